"""A run over several hosts as its commands show it, and what a host is told before it joins."""

from __future__ import annotations

import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

import trinity_es
from tests.helpers.handmade import cli
from tests.helpers.hosts import Head, StartHead, host_joins, ready
from trinity_es.actors.hosts.head_client import HeadPlace
from trinity_es.events import vocabulary as ev
from trinity_es.projections.reading.host_list import HostRow, read_hosts
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]

TIMEOUT = 15.0
"""Seconds after which a host that is not heard of is lost: long enough for two commands on a busy machine."""


def told(*command: str, log: str) -> Any:
    return orjson.loads(cli(*command, "--json", "--log", log).stdout)


def row(head: Head, host: str) -> dict[str, Any]:
    found = told("hosts", log=head.url)
    return next(r for r in (found["head"], *found["hosts"]) if r["host"] == host)


def now(head: Head, host: str) -> HostRow:
    """The same, asked at once: for what passes."""
    with trinity_es.open_log(head.url) as log:
        return next(r for r in read_hosts(log, head.client.status()) if r.host == host)


def test_what_is_shown_of_a_host_is_what_the_log_has_at_each_turn_of_its_life(start_head: StartHead) -> None:
    head = start_head(timeout=TIMEOUT)
    assert [told("hosts", log=head.url)[k] for k in ("hosts", "lives")] == [[], []]
    with host_joins(head.url, "b", head.folder) as b:
        ready(head.client, "b")
        head.submit(1, 64, 3.0)
        wait_until(lambda: now(head, "b").units > 0, "work for b", 20)
        at_work = now(head, "b")
        assert (at_work.state, at_work.epoch, at_work.connected, at_work.ready) == ("joined", 1, True, ["runner-0@b"])
        assert at_work.places["cores"] > 0
        b.kill()
        said: list[str] = []

        def is_told() -> bool:
            said.append(str(head.client.why(1)))
            return "host b has not been heard of" in said[-1]

        wait_until(is_told, "why says that b is away", TIMEOUT - 1)
        assert re.search(r"on runner-0@b #\d+ .*: host b has not been heard of for .* after 15 s", said[-1])
        wait_until(lambda: bool(head.events(ev.HostLost)), "the loss of b", TIMEOUT + 15)
        assert "host b       lost since" in cli("status", "--log", head.url).stdout
        lost = row(head, "b")
        assert (lost["state"], lost["lost"], lost["runners"]) == ("lost", 1, [])
        assert lost["reason"].startswith("not heard of for")
        out = cli("runners", "--log", head.url).stdout
        assert re.search(r"host b: 1 death with the host \(\d+ attempts?", out)
        assert "the head: no deaths" in out
        head.finish(1, 64)
        ran = head.ran_on(1)
        assert {host: row(head, host)["finished"] for host in ("", "b")} == {host: ran[host] for host in ("", "b")}
        failed = head.events(ev.AttemptFailed)
        assert row(head, "b")["attempts_lost"] == len(failed) > 0
        [life] = told("hosts", log=head.url)["lives"]
        with trinity_es.open_log(head.url) as log:
            [joined, gone] = list(log.read(stream="hosts"))
        assert (life["joined_at"], life["ended_at"]) == (joined.recorded_at, gone.recorded_at)


def checked(head: Head, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Findings of `doctor --host`, by what they are of."""
    done = cli("doctor", "--host", head.url, "--json", *options)
    found = orjson.loads(done.stdout)
    assert done.exit_code == (not found["ok"]), done.stdout
    by: dict[str, list[dict[str, Any]]] = {}
    for f in found["findings"]:
        by.setdefault(f["what"], []).append(f)
    return by


def test_a_host_that_fits_is_told_so_and_nothing_joins(start_head: StartHead, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    head = start_head(timeout=TIMEOUT, model={"model_path": str(model)})
    found = checked(head, "--name", "b")
    wrong = [f for of in found.values() for f in of if f["verdict"] in ("missing", "wrong")]
    assert wrong == []
    for what in ("database", "config", "head", "key", "trinity-es", "joining", "model"):
        assert [f["verdict"] for f in found[what]].count("ok") > 0, what
    assert "the head would accept this host as b" in found["joining"][0]["told"]
    assert str(model) in found["model"][0]["told"]
    assert head.events(ev.HostJoined) == []
    assert head.client.status()["hosts"] == []
    (model / "config.json").write_text('{"changed": true}')  # both sides see the same file: still the same
    assert checked(head)["model"][0]["verdict"] == "ok"


def test_another_key_taken_name_and_shut_port_are_told(start_head: StartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head = start_head(timeout=TIMEOUT)
    with host_joins(head.url, "b", head.folder):
        ready(head.client, "b")
        [joining] = checked(head, "--name", "b")["joining"]
        assert joining["verdict"] == "wrong"
        assert "a host named b has already joined" in joining["told"]
        assert checked(head, "--name", "c")["joining"][0]["verdict"] == "ok"
        assert head.client.status()["hosts"][0]["connected"], "a check takes no host's place"
    with monkeypatch.context() as other:
        other.setenv("TRINITY_ES_KEY", "another key, which is long enough for one")
        [key] = checked(head)["key"]
        assert key["verdict"] == "wrong"
        assert "key" in key["told"]
        assert "use the head's key here" in key["way_out"]
    with closing(socket.create_server(("127.0.0.1", 0))) as shut, monkeypatch.context() as elsewhere:
        port = shut.getsockname()[1]
        elsewhere.setattr("trinity_es.cli.join_checks.find_head", lambda url: HeadPlace(f"127.0.0.1:{port}", bytes(32)))
        elsewhere.setattr("trinity_es.cli.join_checks.PATIENCE_SECONDS", 0.5)
        elsewhere.setattr("trinity_es.cli.join_checks.ANSWER_SECONDS", 1.0)
        [silent] = checked(head)["head"]
        assert silent["verdict"] == "missing"
        shut.close()
        [refused] = checked(head)["head"]
        assert refused["verdict"] == "missing"
        assert f"127.0.0.1:{port} can't be reached" in refused["told"]
        assert "hosts.address" in refused["way_out"]
