"""What a runner tells of the runs that play in it, and its loop, on which no unit holds up another."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_es.actors.config.run_sections import SystemConfig
from trinity_es.actors.rollout.shared_event_loop import UNIT, WORKFLOW_THREADS, EngineLoop, mark_as_runner, unit_context
from trinity_es.actors.runner.actor import Runner
from trinity_es.actors.runner_activity import SHOWN_RUNS, RunActivity, runner_state, states_table
from trinity_es.testing import ManualClock

KNOWN = {"runner": "runner-0", "incarnation": 1, "model": "rollout", "state": "ready", "model_version": 3, "units": 2}


def test_p14_the_longest_run_stands_for_the_runner_and_all_are_listed() -> None:
    clock = ManualClock(100.0)
    played = RunActivity(clock)
    with played.show("7/0/0", 1, 2):
        clock.advance(5.0)
        with played.show("7/1/0", 4, 3):
            clock.advance(1.0)
            state = runner_state(played, **KNOWN)
    assert {k: state[k] for k in ("workflow_id", "begin_time", "end_time", "running_time", "running_count")} == {
        "workflow_id": "7/0/0", "begin_time": 100.0, "end_time": None, "running_time": 6.0, "running_count": 2,
    }
    assert [(r["workflow_id"], r["runs"], r["model_version"], r["begin_time"], r["running_time"])
            for r in state["running"]] == [("7/0/0", 1, 2, 100.0, 6.0), ("7/1/0", 4, 3, 105.0, 1.0)]
    assert {**state, **KNOWN} == state
    assert state["answered"]


def test_p14_where_nothing_plays_the_last_run_is_told_with_its_end() -> None:
    clock = ManualClock(100.0)
    played = RunActivity(clock)
    assert runner_state(played, **KNOWN)["workflow_id"] is None
    with contextlib.suppress(RuntimeError), played.show("7/0/0", 1, 2):  # one that failed, or was stopped
        clock.advance(2.0)
        raise RuntimeError
    clock.advance(50.0)
    state = runner_state(played, **KNOWN)
    assert (state["workflow_id"], state["begin_time"], state["end_time"]) == ("7/0/0", 100.0, 102.0)
    assert (state["running_time"], state["running"], state["running_count"]) == (2.0, [], 0)


def test_p14_a_second_attempt_is_shown_while_the_first_is_still_ending() -> None:
    played = RunActivity(ManualClock())
    first, second = played.show("7/0/0", 1, 0), played.show("7/0/0", 1, 0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [row["workflow_id"] for row in played.running()] == ["7/0/0"]
    second.__exit__(None, None, None)
    assert played.running() == []


def test_p14_a_state_fits_into_a_message() -> None:
    played = RunActivity(ManualClock())
    shown = [played.show(f"7/{i}/0", 1, 0) for i in range(SHOWN_RUNS + 5)]
    for each in shown:
        each.__enter__()
    state = runner_state(played, **KNOWN)
    assert (len(state["running"]), state["running_count"]) == (SHOWN_RUNS, SHOWN_RUNS + 5)


def test_p14_the_table_has_a_line_a_runner() -> None:
    clock = ManualClock(10.0)
    played = RunActivity(clock)
    with played.show("7/0/3", 1, 3):
        clock.advance(12.34)
        busy = runner_state(played, **KNOWN)
    silent = runner_state(None, **{**KNOWN, "model": "judge", "state": "ready", "units": 0})
    lines = states_table({"runner-0": busy, "judge-0": silent}).splitlines()
    assert [line.split() for line in lines] == [
        ["runner", "model", "state", "version", "units", "playing", "longest", "for", "s"],
        ["judge-0", "judge", "ready,", "silent", "3", "0", "0", "-", "-"],
        ["runner-0", "rollout", "ready", "3", "2", "1", "7/0/3", "12.3"],
    ]


def test_several_heartbeats_may_get_lost_before_a_process_is_ended() -> None:
    for timeout in (0.5, 4.0, 20.0, 600.0):
        assert SystemConfig(heartbeat_timeout=timeout).beat_seconds * 4 < timeout


@pytest.mark.parametrize(("answers", "silent"), [(True, [0.0, 0.0, 0.0, 0.0]), (False, [0.0, 0.0, 4.006, 8.009])])
def test_a_loop_that_answers_each_beat_is_not_silent_though_beats_are_late(answers: bool, silent: list[float]) -> None:
    now = [100.0]
    side = SimpleNamespace(waits_for="", runs_wait="", loop=SimpleNamespace(playing=lambda: None),
                           reporter=SimpleNamespace(trouble=""),
                           ping=lambda answered: answered() if answers else None)
    told: dict[str, list[float]] = {"guardian": [], "coordinator": []}
    system = SystemConfig()
    runner: Any = SimpleNamespace(
        now=lambda: now[0], after=lambda *_: None, beat=None, loop_answered_at=100.0, last_beat_at=100.0,
        engine_thread=side, config=SimpleNamespace(system=system), final_report=None,
        name="runner-0", incarnation=1, epoch=1, beat_count=0, coordinator=None,
        tell=lambda beat: told["coordinator"].append(round(beat.silent, 3)),
        send=lambda to, beat: told[to].append(round(beat.silent, 3)), guardian="guardian",
    )
    for _ in silent:
        Runner.beat(runner)
        now[0] += system.beat_seconds + 0.003
    assert told == {"guardian": silent, "coordinator": silent}


def test_runs_that_wait_for_something_outside_are_counted_and_the_longest_is_told() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    played = RunActivity(clock)
    with played.show("1/0/0", 1, 0) as first, played.show("1/0/1", 1, 0) as second, played.show("1/1/0", 1, 0):
        assert played.waiting_text() == ""
        second["state"] = {"waits_for": "the other server"}
        assert played.waiting_text() == "1 of its runs waits for the other server"
        first["state"] = {"waits_for": "the server"}
        assert played.waiting_text() == "2 of its runs wait for the server"
        first["state"], second["state"] = {"waits_for": ""}, {"waits_for": 7}
        assert played.waiting_text() == "", "one that waits no more, and what is no text"
    assert played.waiting_text() == ""


def of_unit(name: str) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(UNIT.set, name)
    return context.run(unit_context)


def test_names_that_one_unit_looks_up_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, real = threading.Event(), socket.getaddrinfo

    def lookup(host: Any, *args: Any, **how: Any) -> Any:
        assert host != "slow" or answered.wait(20)
        return real("127.0.0.1", *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def looked_up(host: str) -> None:
        assert (await asyncio.get_running_loop().getaddrinfo(host, 80, type=socket.SOCK_STREAM))[0][4][1] == 80

    def play() -> None:
        mark_as_runner()
        loop = EngineLoop(2)

        async def main() -> None:
            slow = [loop.create_task(looked_up("slow"), context=of_unit("a")) for _ in range(2 * WORKFLOW_THREADS)]
            await asyncio.wait_for(loop.create_task(looked_up("quick"), context=of_unit("b")), 10)
            await asyncio.wait_for(looked_up("quick"), 10)  # the runner's own
            answered.set()
            await asyncio.gather(*slow)
            for unit in ("a", "b"):
                loop.forget(unit)

        playing = loop.create_task(main())
        playing.add_done_callback(lambda _: super(EngineLoop, loop).stop())  # its own refuses
        try:
            loop.run_forever()
        finally:
            answered.set()
            loop.close()
        playing.result()

    contextvars.copy_context().run(play)
