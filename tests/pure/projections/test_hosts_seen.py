"""What is shown of a run's hosts, on a log by hand: number by number, and nothing where there is one host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import write
from tests.helpers.several_hosts import BROKE, several_hosts, write_several_hosts
from tests.helpers.story import Story, configured, status
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.host_states import host_lives, left_reason, lost_reason, went_with_host
from trinity_es.projections.reading.host_list import host_list, read_hosts
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.safe_text import summary


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_several_hosts(tmp_path_factory.mktemp("hosts") / "log.sqlite")


def test_a_host_is_told_by_its_lives(log: str) -> None:
    with open_log(log) as opened:
        lives = opened.hosts()
        at = {(type(r.event).__name__, r.event.host, r.event.epoch): r.recorded_at  # type: ignore[attr-defined]
              for r in opened.read(stream="hosts")}
    assert [(x.host, x.epoch, x.state, x.reason) for x in lives] == [
        ("b", 1, "lost", BROKE), ("c", 1, "left", "SIGTERM"), ("b", 2, "joined", ""),
        ("d", 1, "draining", "its disk is replaced"),
    ]
    lost, left, _, drains = lives
    assert (lost.joined_at, lost.since, lost.ended_at) == \
        (at["HostJoined", "b", 1], at["HostLost", "b", 1], at["HostLost", "b", 1])
    assert (left.draining_at, left.since) == (at["HostDraining", "c", 1], at["HostLeft", "c", 1])
    assert (drains.draining_at, drains.ended_at) == (at["HostDraining", "d", 1], None)


def test_an_event_of_a_life_that_is_over_changes_no_later_one() -> None:
    story = Story()
    for event in (_joined("b"), ev.HostLost(host="b", epoch=1, reason="x"), _joined("b", 2),
                  ev.HostLost(host="b", epoch=1, reason="late")):
        story.add("hosts", event)
    first, second = host_lives(story.recorded)
    assert (first.state, first.reason) == ("lost", "x")
    assert second.is_present


def test_hosts_are_listed_with_what_they_did(log: str) -> None:
    with open_log(log) as opened:
        rows = {row.host: row for row in read_hosts(opened)}
    assert list(rows) == ["", "b", "c", "d"]
    assert {h: (r.state, r.finished, r.units, r.joined, r.lost, r.runner_deaths, r.attempts_lost, r.ready)
            for h, r in rows.items()} == {
        "": ("gone", 2, 0, 0, 0, 0, 0, []), "b": ("joined", 1, 1, 2, 1, 1, 3, ["runner-0@b"]),
        "c": ("left", 4, 0, 1, 0, 0, 0, []), "d": ("draining", 1, 1, 1, 0, 0, 0, ["runner-0@d"])}


def test_what_the_system_says_lies_over_its_log() -> None:
    rows: list[dict[str, Any]] = [
        {"runner": "runner-0@b", "state": "ready", "places": 8, "load": 3},
        {"runner": "runner-1@b", "state": "started", "places": 0, "load": 0},
        {"runner": "runner-2@b", "state": "quarantined", "places": 8, "load": 0},
        {"runner": "runner-0", "state": "ready", "places": 4, "load": 1},
    ]
    away = {"host": "b", "epoch": 2, "state": "joined", "connected": False, "away_for": 7.5, "why_away": "cut",
            "units": 3, "reason": ""}
    lives = host_lives(Story().add("hosts", _joined("b"), ev.HostLost(host="b", epoch=1, reason=BROKE),
                                   _joined("b", 2)).recorded)
    head, b = host_list(lives, [], finished={"b": 4}, all_finished=10, units={}, processes={"up": None},
                        live={"epoch": 3, "runners": rows, "hosts": [away]})
    assert (head.state, head.epoch, head.finished, head.ready, head.runner_places, head.units) == \
        ("leads", 3, 6, ["runner-0"], 4, 1)
    assert (b.connected, b.away_for, b.why_away, b.units, b.runner_places) == (False, 7.5, "cut", 3, 8)
    assert (b.runners, b.ready) == (["runner-0@b", "runner-1@b"], ["runner-0@b"])


def test_what_is_run_again_counts_once_and_the_tables_are_those_of_a_rebuild(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    write_several_hosts(path)
    reopened = ev.TaskReopened(task=5, units=[ev.Unit(task=5, run_id_base=0, runs=1, attempt=2)], reason="wanted",
                               finished=True, experiences=1)
    write(path, [("batch/1", [reopened])])
    with open_log(str(path)) as log:
        assert log.finished_elsewhere() == {"b": 1, "c": 3, "d": 1}
        assert log.verify() == []
    again = next(event for _, events in several_hosts() for event in events if isinstance(event, ev.BatchSubmitted))
    ended = ev.TaskFinished(task=0, run_id_base=0, attempt=1, runner="runner-0@d", incarnation=7, payload=None,
                            runs=[ev.RunResult(run=0, metrics={}, experiences=0)], model_version=0,
                            model_version_end=0, seconds=0.1)
    sent = ev.TasksDispatched(runner="runner-0@d", incarnation=7, model_version=0,
                              units=[ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)])
    aborted = ev.BatchAborted(reason="anew", result={})
    with EventLog.open(str(path), projectors=projectors()) as events:  # one commit, as a run that begins anew
        events.append([Write(stream="batch/1", expected_version=events.stream_version("batch/1"),
                             events=[aborted, again, sent, ended])], commit_id="again")
    with open_log(str(path)) as log:
        assert {h: n for h, n in log.finished_elsewhere().items() if n} == {"d": 1}
        assert [row.finished for row in read_hosts(log)] == [0, 0, 0, 1]
        assert [p for p in log.verify() if "rm_host_work" in p] == []


def test_only_what_the_coordinator_says_of_a_host_is_no_fault_of_the_runner() -> None:
    assert went_with_host("runner-0@b", lost_reason("b", "cut"))
    assert went_with_host("runner-0@b", left_reason("b", "SIGTERM"))
    assert not went_with_host("runner-0@b", "exit status -9")
    assert not went_with_host("runner-0@bb", lost_reason("b", "cut"))
    assert not went_with_host("runner-0", lost_reason("", "cut"))


# --- why ------------------------------------------------------------------------------------------------------------
def _joined(host: str, epoch: int = 1) -> ev.HostJoined:
    return ev.HostJoined(host=host, epoch=epoch, life=f"{host}{epoch}", address="10.0.0.2", pid=11,
                         places={"gpus": 8, "cores": 64})


def a_run(*, pending: int = 0, places: int = 8) -> Story:
    """A batch over the head and host b: task 0 is here, task 1 there, and `pending` more wait."""
    story = Story().add("system", ev.SystemConfigured(config={**configured().config, "hosts": {"timeout": 15.0}}))
    story.runner("runner-0", places=places).add("hosts", _joined("b")).runner("runner-0@b", 2, places=places)
    return story.at(10).batch(tasks=2 + pending).dispatch(0).dispatch(1, runner="runner-0@b", incarnation=2)


def told_live(*hosts: dict[str, Any], places: int = 8) -> dict[str, Any]:
    rows = [{"runner": "runner-0", "load": 1, "places": places},
            {"runner": "runner-0@b", "incarnation": 2, "load": 1, "places": places}]
    return status(*rows, children=[{"name": "runner-0", "state": "ready", "incarnation": 1}], hosts=list(hosts))


def test_a_unit_on_a_host_that_is_away_says_since_when_and_what_comes() -> None:
    away = {"host": "b", "epoch": 1, "state": "joined", "connected": False, "away_for": 4.0, "reason": "",
            "why_away": "it ended the connection"}
    told = a_run().why(20, live=told_live(away), system={"up": True})
    assert told.cause == "away"
    first = told.waiting[0]
    assert (first.host, first.runner, first.task) == ("b", "runner-0@b", 1)
    assert re.search(r"^task 1, runs 0-3, attempt 1 of 3 on runner-0@b #2 for 10 s of at most 60 s: host b has not "
                     r"been heard of for 4\.0 s, since .* \(it ended the connection\); it is lost after 15 s, and this "
                     r"is attempted elsewhere then$", first.text)
    assert [w.cause for w in told.waiting] == ["away", "running"]
    assert "`trinity-es hosts`" in str(told)


def test_a_unit_on_a_host_that_drains_runs_on_and_says_so() -> None:
    story = a_run().at(12).add("hosts", ev.HostDraining(host="b", epoch=1, reason="SIGTERM"))
    told = story.why(20, live=told_live(), system={"up": True})
    [unit] = [w for w in told.waiting if w.host == "b"]
    assert unit.cause == "running"
    assert re.search(r"; its host b drains since .* \(SIGTERM\)$", unit.text)


def test_units_wait_for_no_runner_of_a_host_that_drains() -> None:
    story = a_run(pending=6, places=1).at(12).add("hosts", ev.HostDraining(host="b", epoch=1, reason="SIGTERM"))
    told = story.why(20, live=told_live(places=1), system={"up": True})
    assert "all 1 places of 1 runner are taken" in str(told)
    [host] = [w for w in told.waiting if w.cause == "draining"]
    assert re.search(r"^host b drains since .* \(SIGTERM\): its runner gets no more units$", host.text)
    assert "loading weights" not in str(told)


def test_a_batch_whose_only_host_is_lost_needs_a_person_and_names_it() -> None:
    story = Story().add("system", configured()).add("hosts", _joined("b")).runner("runner-0@b", 2)
    story.at(10).batch(tasks=2).at(12).add("hosts", ev.HostLost(host="b", epoch=1, reason=BROKE))
    story.add("runner/runner-0@b", ev.RunnerLost(runner="runner-0@b", incarnation=2, reason=lost_reason("b", BROKE)))
    told = story.why(20, live=status(children=[], hosts=[]) | {"runners": []}, system={"up": True})
    assert (told.cause, told.stalled) == ("host_lost", True)
    assert re.search(rf"host b is lost since .* \({BROKE}\): its runners come back with it", told.sentence)
    assert "`trinity-es join` on it brings it back" in str(told)
    assert "is started again" not in str(told)


def test_a_host_that_left_is_waited_for_by_nobody() -> None:
    story = a_run(pending=6, places=1).at(12).add("hosts", ev.HostLeft(host="b", epoch=1, reason="SIGTERM"))
    story.add("runner/runner-0@b", ev.RunnerRetired(runner="runner-0@b", incarnation=2))
    told = story.why(20, live=told_live() | {"runners": status({"load": 1})["runners"]}, system={"up": True})
    assert [w.text for w in told.waiting if w.cause in ("ended", "draining", "host_lost")] == []


def test_an_event_of_a_host_is_a_sentence() -> None:
    assert summary(_joined("b")) == "b #1 from 10.0.0.2, pid 11, 8 gpus, 64 cores"
    assert summary(ev.HostLost(host="b", epoch=1, reason=BROKE)) == f"b #1: {BROKE}"
