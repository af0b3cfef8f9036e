"""What a host that joins must have, how it reads the run's config and leaves, what Ray is asked for: without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.handmade import cli, write
from tests.helpers.links import OTHER, Heard, dialer
from trinity_es.actors import messages
from trinity_es.actors.engines.devices import device_environment, first_gpus
from trinity_es.actors.guardian.actor import Guardian
from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.head_client import HeadPlace, NotOurs
from trinity_es.actors.hosts.host_comparison import machine_facts, model_digest
from trinity_es.cli import join_checks
from trinity_es.cli.join_checks import HeadAnswer, ask_head, compare_with_head, folder_finding
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, SyncError
from trinity_es.hosts.join import HostRun, host_config, require_gpus
from trinity_es.hosts.run_on_ray import Agent, head_config, host_resources


def config(*auxiliary: dict[str, Any], hosts: dict[str, Any] | None = None, url: str = "postgresql://u@db/run",
           **rollout: Any) -> Config:
    return Config.from_dict({
        "store": {"url": url}, "hosts": hosts or {},
        "explorer": {"rollout_model": rollout, "auxiliary_models": list(auxiliary)},
    })


@pytest.mark.parametrize(("gpus", "said"), [
    ("0,1,2,3", ""), ("0,1", "judge needs 4"), ("3", "rollout_model needs 2"), ("", ""),
])
def test_a_host_with_too_few_gpus_is_refused(gpus: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    given = config({"name": "judge", "tensor_parallel_size": 4}, tensor_parallel_size=2)
    if not said:
        require_gpus(given, "b")
        return
    with pytest.raises(ConfigError, match=said) as refused:
        require_gpus(given, "b")
    assert f"host b may use {len(gpus.split(','))} GPUs ({', '.join(gpus.split(','))})" in str(refused.value)
    assert "--set" in str(refused.value)


def test_engines_that_span_no_gpus_of_the_host_fit_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    require_gpus(config(engine_type="scripted", tensor_parallel_size=8), "b")
    servers = {"urls": ["http://gpu-7:8000"]}
    require_gpus(config(engine_type="http", servers=servers, tensor_parallel_size=8), "b")


def test_engines_of_a_host_get_the_gpus_that_it_has_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Ray gave it too, whatever their numbers are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first = first_gpus([("runner-0@b", 2), ("runner-1@b", 2)])
    assert [device_environment(at, 2, 4) for at in first.values()] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]


def test_ray_is_asked_for_what_the_engines_of_a_host_take() -> None:
    judge = {"name": "judge", "engine_num": 2}
    given = config(judge, engine_num=3, tensor_parallel_size=2)
    assert host_resources(given, gpus=True) == {"CPU": 5.0, "GPU": 8.0}
    assert host_resources(given, gpus=False) == {"CPU": 5.0}
    assert host_resources(config(engine_type="scripted"), gpus=True) == {"CPU": 1.0}


def test_the_head_on_ray_is_at_its_node_s_address_and_only_leads() -> None:
    found = head_config(config(), "10.0.0.7")
    assert (found.hosts.address, found.hosts.engines_on_head) == ("10.0.0.7:7700", False)
    assert head_config(config(hosts={"address": "any:7800"}), "fd00::7").hosts.address == "[fd00::7]:7800"


@pytest.mark.parametrize(("given", "said"), [
    ({"url": "sqlite:///x.sqlite"}, "SQLite file, which only one host can use"),
    ({"engine_type": "http", "servers": {"urls": ["http://gpu-7:8000"]}}, "Ray has no engines to place"),
])
def test_what_ray_has_nothing_to_place_for_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        head_config(config(**given), "10.0.0.7")


@pytest.mark.parametrize(("hosts", "said"), [
    ({"engines_on_head": False}, r"engines_on_head: false without an address"),
    ({"address": "10.0.0.1:7700", "tls": {"cert": "/c.pem"}}, r"hosts\.tls.*hosts speak TLS by themselves, leave it"),
])
def test_a_head_without_engines_or_hosts_and_certificates_between_hosts_are_refused(
    hosts: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(hosts=hosts)


def test_an_agent_that_can_t_work_says_so_and_goes_on_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", "to be put back")
    monkeypatch.chdir(tmp_path)
    agent = Agent({"config": {"unknown": 1}, "key": "k" * 40, "folder": "/nowhere"}, 0)
    try:
        agent._ended.wait(0.5)
        problem = agent.report()["problem"]
        assert "unknown" in problem["text"]
        assert problem["for_good"]
    finally:
        agent.leave("the test ends")
    assert not agent._thread.is_alive()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A log whose run has a judge besides its rollout model."""
    made = f"sqlite:///{tmp_path / 'log.sqlite'}"
    judge = {"name": "judge", "engine_type": "scripted", "model_path": "/head/judge"}
    explorer: dict[str, Any] = {
        "rollout_model": {"engine_type": "scripted", "model_path": "/head/model"}, "auxiliary_models": [judge]}
    config = Config.from_dict({"explorer": explorer, "store": {"url": made}}, folder=tmp_path)
    write(tmp_path / "log.sqlite", [(ev.SystemConfigured.stream, [ev.SystemConfigured(config=config.masked())])])
    return made


@pytest.mark.parametrize("override", [
    "explorer.auxiliary_models=[]", "explorer.auxiliary_models=null",
    "explorer.auxiliary_models=[{name: judge, engine_type: scripted, engine_num: 0}]",
])
def test_a_host_without_a_model_that_tasks_ask_is_refused(url: str, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"no engine of judge, but .*engine_type http"):
        host_config(url, "b", [override], tmp_path / "logs")


def test_models_lie_on_a_host_where_they_were_pulled_to(url: str, tmp_path: Path) -> None:
    as_it_is = host_config(url, "b", [], tmp_path / "logs")
    assert as_it_is.explorer.rollout_model.model_path == "/head/model"
    folders = {"/head/model": "/here/one", "/head/judge": "/here/two"}
    config = host_config(url, "b", [], tmp_path / "logs", model_folders=folders)
    assert config.explorer.rollout_model.model_path == "/here/one"
    assert [m.model_path for m in config.explorer.auxiliary_models] == ["/here/two"]


def guardian(epoch: int) -> tuple[Any, list[Any], list[str]]:
    sent: list[Any] = []
    ended: list[str] = []
    it = SimpleNamespace(
        config=SimpleNamespace(host="b"), stopping=False, epoch=epoch, coordinator_address="agent",
        send=lambda to, message: sent.append(message), end=ended.append, log=logging.getLogger(__name__))
    return it, sent, ended


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_host_that_no_head_took_in_ends_at_once_and_another_is_to_be_drained(epoch: int) -> None:
    it, sent, ended = guardian(epoch)
    for _ in range(2):
        Guardian.on_HostLeaves(it, messages.HostLeaves("SIGTERM"), None)
    assert bool(ended) == (epoch == 0)
    assert len(sent) == (2 if epoch else 0), "each word goes on: the one before may be lost"


async def test_a_pull_is_given_up_when_the_host_leaves(tmp_path: Path) -> None:
    run = HostRun("postgresql://nowhere/run", "b", [], tmp_path, report=lambda text: None)
    run.leave("SIGTERM", 30.0)
    begun = time.monotonic()

    async def pull() -> Path:
        await asyncio.sleep(60.0)
        return tmp_path

    with pytest.raises(SyncError, match="this host is leaving"):
        await run._await_unless_leaving(pull())
    assert time.monotonic() - begun < 5.0


MINE: dict[str, Any] = {"build": "1", "python": "3.11.7", "packages": {"vllm": "0.9", "torch": "2.7"}}


def verdicts(theirs: Mapping[str, Any], *, vllm: bool = True) -> dict[str, str]:
    answer = HeadAnswer(would_refuse="", facts={**MINE, **theirs})
    return {f.what: f.verdict for f in compare_with_head(answer, MINE, with_vllm=vllm)}


@pytest.mark.parametrize(("theirs", "vllm", "what", "verdict"), [
    ({"build": "2"}, False, "trinity-es", "wrong"),
    ({"python": "3.12.7"}, True, "python", "note"), ({"python": "3.11.9"}, True, "python", "ok"),
    ({"packages": {"vllm": "0.10", "torch": "2.7"}}, True, "vllm", "wrong"),
    ({"packages": {"vllm": "0.10", "torch": "2.7"}}, False, "vllm", "note"),
    ({"packages": {"vllm": "0.9", "torch": "2.8"}}, True, "torch", "note"),
])
def test_what_differs_from_the_head_is_told(theirs: dict[str, Any], vllm: bool, what: str, verdict: str) -> None:
    assert verdicts(theirs, vllm=vllm)[what] == verdict
    assert verdicts({}) == {"trinity-es": "ok", "python": "ok", "vllm": "ok", "torch": "ok"}


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


async def test_the_head_says_what_it_is_whether_it_takes_the_host_in_and_that_it_has_another_key() -> None:
    head = Heard(facts=lambda: {"build": "7"})
    head.refuses = Admission(refused="taken already")
    says = await ask_head(dialer(head), {"name": "b"})
    assert head.hellos == [{"name": "b", "check": True}]
    with pytest.raises(NotOurs, match="another key"):
        await ask_head(dialer(head, key=lambda: OTHER), {"name": "b"})
    head.end.stop()
    assert (says.would_refuse, says.facts["build"]) == ("taken already", "7")


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
