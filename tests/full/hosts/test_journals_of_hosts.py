"""Promise 12 over hosts: the head has what a lost host or runner had generated, since its journal is in PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import Head, JoinedHost, StartHead, host_joins, ready
from tests.helpers.lost_runs import LONG, SECTIONS, SHORT, TwoCalls, journaled
from tests.helpers.of_the_day import of_the_day
from trinity_es import Task
from trinity_es.events import vocabulary as ev
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]

TASKS = 12


def kill(head: Head, host: JoinedHost, what: str) -> None:
    if what == "host":
        host.kill()
        return
    [process] = [p for p in map(psutil.Process, host.left()) if p.cmdline()[0].startswith(what)]
    process.kill()


@pytest.mark.parametrize("what", ["host", *of_the_day(["Runner", "HostAgent"])])
def test_promise_12_an_answer_of_a_lost_host_goes_on_elsewhere(
    what: str, start_head: StartHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))

    def asked() -> list[tuple[int, ...]]:
        lines = requests.read_text().splitlines() if requests.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    head = start_head(explorer=SECTIONS["explorer"])
    with host_joins(head.url, "b", head.folder) as b:
        ready(head.client, "b")
        head.client.submit_batch(batch_id=1, tasks=[Task(workflow=TwoCalls)] * TASKS, batch_type="train")
        wait_until(lambda: asked().count((2 + SHORT, LONG)) == TASKS, "all long answers to begin")
        size = journaled(head.client)
        wait_until(lambda: journaled(head.client) > size + TASKS * 1_000, "a part of each to be in the journal")
        kill(head, b, what)
        head.finish(1, TASKS)
    kept = head.events(ev.AttemptKept)
    again = [request for request in asked() if request not in ((2, SHORT), (2 + SHORT, LONG))]
    assert asked().count((2, SHORT)) == TASKS, "a whole answer was asked for again"
    assert asked().count((2 + SHORT, LONG)) == TASKS, "a long answer began again"
    if what == "HostAgent":
        assert kept == again == [], "its runners live, and go on"
        return
    assert {e.runner for e in kept} == {"runner-0@b"}
    assert {(e.calls, e.open_calls) for e in kept} == {(1, 1)}
    parts = sorted(e.tokens - SHORT for e in kept)
    assert parts[0] > 0
    assert sorted(again) == [(2 + SHORT + part, LONG - part) for part in parts]
    assert sorted(e.info["splices"][0] for e in head.client.experiences(1) if "splices" in e.info) == parts
