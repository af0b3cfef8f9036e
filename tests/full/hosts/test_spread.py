"""How work spreads over hosts: to each its share, and no place idle while work waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import trinity_es
from benchmarks.chaos_hosts_account import SHARE
from tests.helpers.hosts import KEY, head_of, host_joins, ready
from tests.helpers.systems import sleepers
from trinity_es.events import vocabulary as ev
from trinity_es.projections.host_states import host_of

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(280)]
HOSTS = ("b", "c", "d")
PLACES = 8
"""Of each host, as of the head."""
SECONDS = 1.0
"""How long a task takes."""


def idle_beside_overfull(url: str, batch: int) -> list[str]:
    """Return when a place was idle, by the log, while a unit waited for one: not dispatched, or behind others.

    For half a task, at least: what a runner says takes its time to the log, on a busy machine above all.
    """
    found: list[str] = []
    load, waiting, behind, since = dict.fromkeys(("", *HOSTS), 0), 0, 0, float("inf")
    with trinity_es.open_log(url) as log:
        commits: dict[float, list[ev.Event]] = {}
        for item in log.events(batch):
            commits.setdefault(item.recorded_at, []).append(item.event)
    for at, events in commits.items():
        if at - since >= SECONDS / 2:
            found.append(f"{waiting} waited, {behind} behind others for {at - since:.2f} s: {load}")
        for event in events:
            match event:
                case ev.BatchSubmitted():
                    waiting += len(event.repeat_times)
                case ev.TasksDispatched():
                    waiting -= len(event.units)
                    load[host_of(event.runner)] += len(event.units)
                case ev.RunsFinished():
                    load[host_of(event.runner)] -= 1
        behind = sum(max(0, units - PLACES) for units in load.values())
        now = waiting + behind > 0 and min(load.values()) < PLACES
        since = min(since, at) if now else float("inf")
    return found


def test_f3_four_hosts_get_their_shares_and_no_place_is_idle_while_work_waits(
    postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    url = postgres()
    with head_of(url, tmp_path) as head, contextlib.ExitStack() as stack:
        for name in HOSTS:
            stack.enter_context(host_joins(url, name, tmp_path))
        for name in HOSTS:
            ready(head.client, name)
        head.submit(1, 320, SECONDS)
        head.finish(1, 320)
        ran = head.ran_on(1)
        assert all(abs(ran[name] / 80 - 1) <= SHARE for name in ("", *HOSTS)), ran
        assert idle_beside_overfull(url, 1) == []

        # Short units, of which some wait in a runner, and then long ones
        short, long = sleepers(400, seconds=0.01), sleepers(96, seconds=1.0)
        head.client.submit_batch(batch_id=2, tasks=[*short, *long], batch_type="train")
        head.finish(2, 496)
        assert idle_beside_overfull(url, 2) == []
