"""What `doctor --host` makes of what it found: which difference from the head is wrong, and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import cli
from tests.helpers.links import OTHER, Heard, dialer
from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.head_client import HeadPlace, NotOurs
from trinity_es.actors.hosts.host_comparison import machine_facts, model_digest
from trinity_es.cli import join_checks
from trinity_es.cli.join_checks import HeadAnswer, ask_head, compare_with_head, folder_finding
from trinity_es.config.config import Config

MINE: dict[str, Any] = {"build": "1", "python": "3.11.7", "packages": {"vllm": "0.9", "torch": "2.7"}}


def verdicts(theirs: Mapping[str, Any], *, vllm: bool = True) -> dict[str, str]:
    answer = HeadAnswer(would_refuse="", facts={**MINE, **theirs})
    return {f.what: f.verdict for f in compare_with_head(answer, MINE, with_vllm=vllm)}


def test_the_same_as_the_head_is_well() -> None:
    assert verdicts({}) == {"trinity-es": "ok", "python": "ok", "vllm": "ok", "torch": "ok"}
    assert verdicts({"python": "3.11.9"})["python"] == "ok"


@pytest.mark.parametrize(("theirs", "vllm", "what", "verdict"), [
    ({"build": "2"}, False, "trinity-es", "wrong"),
    ({"python": "3.12.7"}, True, "python", "note"),
    ({"packages": {"vllm": "0.10", "torch": "2.7"}}, True, "vllm", "wrong"),
    ({"packages": {"vllm": "0.10", "torch": "2.7"}}, False, "vllm", "note"),
    ({"packages": {"vllm": "0.9", "torch": "2.8"}}, True, "torch", "note"),
])
def test_what_differs_is_told(theirs: dict[str, Any], vllm: bool, what: str, verdict: str) -> None:
    assert verdicts(theirs, vllm=vllm)[what] == verdict


def test_a_model_is_compared_by_its_config_and_the_sizes_of_its_weights(tmp_path: Path) -> None:
    assert model_digest(str(tmp_path / "none")) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    first = model_digest(str(tmp_path))
    assert machine_facts([str(tmp_path), "a/hub-id"])["digests"] == {str(tmp_path): first}
    (tmp_path / "README.md").write_text("of no matter")
    assert model_digest(str(tmp_path)) == first
    assert folder_finding(str(tmp_path), first).verdict == "ok"
    assert folder_finding(str(tmp_path), "another").verdict == "wrong"
    assert folder_finding(str(tmp_path), None).verdict == "note"
    missing = folder_finding(str(tmp_path / "none"), first)
    assert (missing.verdict, "copy it to the same path" in missing.way_out) == ("missing", True)
    (tmp_path / "model.safetensors").write_bytes(b"123456")
    assert model_digest(str(tmp_path)) != first


def test_the_head_says_what_it_is_and_whether_it_would_take_the_host_in() -> None:
    head = Heard(facts=lambda: {"build": "7"})
    head.refuses = Admission(refused="taken already")
    says = asyncio.run(ask_head(dialer(head), {"name": "b"}))
    head.end.stop()
    assert head.hellos == [{"name": "b", "check": True}]
    assert (says.would_refuse, says.facts["build"]) == ("taken already", "7")


def test_a_head_with_another_key_is_told() -> None:
    head = Heard()
    with pytest.raises(NotOurs, match="another key"):
        asyncio.run(ask_head(dialer(head, key=lambda: OTHER), {"name": "b"}))
    head.end.stop()


def test_what_can_t_be_a_store_or_a_name_is_told_at_once(tmp_path: Path) -> None:
    store = cli("doctor", "--host", tmp_path / "log.sqlite")
    assert store.exit_code == 1
    assert "do not work over a network" in store.stdout
    away = cli("doctor", "--host", "postgresql://me:secret@127.0.0.1:9/run", "--json")
    assert away.exit_code == 1
    assert "secret" not in away.stdout
    both = cli("doctor", "config.yaml", "--host", "postgresql://me@127.0.0.1:9/run")
    assert both.exit_code == 2


def test_the_key_is_looked_for_where_join_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_ES_KEY", raising=False)
    monkeypatch.setattr(join_checks, "find_head", lambda url: HeadPlace("127.0.0.1:9", bytes(32)))
    store = {"url": f"sqlite:///{tmp_path}/log.sqlite"}
    config = Config.from_dict({"store": store, "system": {"log_dir": str(tmp_path)}})
    [found] = join_checks._head_findings("postgresql://me@db/run", "b", config, "")
    assert (found.what, found.verdict) == ("key", "missing")
    assert str(tmp_path) in found.told
    assert "TRINITY_ES_KEY" in found.way_out
