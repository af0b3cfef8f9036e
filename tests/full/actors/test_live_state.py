"""The coordinator's live state, folded event by event, against what the next coordinator reads from the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.runner import newest_life
from trinity_es.projections.tables.read_models import projectors

NAMES = ("runner-0", "runner-1")
HAPPENS = st.one_of(
    st.just(("publish", "")),
    st.tuples(st.sampled_from(["born", "up", "up with older", "loaded", "failed", "lost"]), st.sampled_from(NAMES)),
)


class Told:
    """Events as a system would record them: lives follow each other, versions grow."""

    def __init__(self) -> None:
        self.version, self.lives = 0, dict.fromkeys(NAMES, 0)

    def events(self, what: str, name: str) -> list[ev.Event]:
        if what == "publish":
            self.version += 1
            return [ev.WeightsPublished(version=self.version, path=f"/w/{self.version}")]
        if what == "born":
            self.lives[name] += 1
        of: Any = {"runner": name, "incarnation": self.lives[name]}
        if not self.lives[name]:
            return []
        match what:
            case "born":
                return [ev.RunnerStarted(**of, pid=1, host="here", engine="scripted")]
            case "up" | "up with older":
                has = max(self.version - (what != "up"), 0)
                return [ev.RunnerReady(**of, places=1, model_version=has, load_seconds=0.1)]
            case "loaded":
                return [ev.WeightsLoaded(**of, version=self.version, seconds=0.1)] if self.version else []
            case "failed":
                return [ev.WeightsFailed(**of, version=self.version, error="gone")] if self.version else []
            case _:
                return [ev.RunnerLost(**of, reason="killed")]


@settings(max_examples=60, deadline=None)
@example(happens=[("born", "runner-0"), ("publish", ""), ("up", "runner-0")])  # it came up with what was current
@given(happens=st.lists(HAPPENS, min_size=1, max_size=14))
def test_who_has_served_is_the_same_after_a_takeover(tmp_path_factory: Any, happens: list[tuple[str, str]]) -> None:
    place: Path = tmp_path_factory.mktemp("live")
    url = f"sqlite:///{place / 'log.sqlite'}"
    with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        live, told = LiveState(log, open_payloads(url)), Told()
        for number, (what, name) in enumerate(happens):
            if not (events := told.events(what, name)):
                continue
            live.record(*events)
            log.append(live.close_turn().writes, commit_id=f"c{number}")
        read = LiveState(log, open_payloads(url))
        for name in NAMES:
            was, found = newest_life(live.lives, name), newest_life(read.lives, name)
            if was is not None:
                for field in ("incarnation", "state", "was_current"):
                    assert getattr(found, field) == getattr(was, field)
        assert read.weights == live.weights


def submitted(number: int) -> ev.BatchSubmitted:
    """Return the submission of a batch with one task, which ends it nowhere."""
    return ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[1], tasks=[{}], submission=f"s{number}")


def test_only_ids_that_no_batch_can_have_had_are_not_looked_up(tmp_path: Path, postgres: Callable[[], str]) -> None:
    """A trainer counts up: for its next step nothing is read. An earlier id, or a name, may be one that has ended."""
    for url in (f"sqlite:///{tmp_path / 'log.sqlite'}", postgres()):
        with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
            streams = [batch_stream(batch_id) for batch_id in (9, 12, "3/eval", "77", "nightly 500", "99x")]
            end = [ev.BatchAborted(reason="", result={})]
            log.append([Write(stream=s, expected_version=0, events=end) for s in streams], commit_id="ended")
            live = LiveState(log, open_payloads(url))
            read: list[Any] = []
            live.fetch = lambda key, _, read=read: read.append(key)  # type: ignore[misc]  # mypy knows no defaults
            for batch_id in (13, 500, 10**12):
                assert live.find_batch(batch_id) is None
            assert read == []
            for batch_id in (11, 0, -1, "13", "4/eval"):
                assert live.find_batch(batch_id) is None
            assert len(read) == 5
            live.record_batch(40, [submitted(40)])  # from now on 39 may be one that another client sent
            assert live.find_batch(39) is None
            assert live.find_batch(41) is None
            assert read[5:] == ["batch/39"]


def test_promise_6_a_number_that_the_log_rounds_is_rounded_in_the_live_state_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        live = LiveState(log, open_payloads(url))
        unit = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
        exact = ev.RunResult(run=0, metrics={"reward": 2**53 + 1})  # which no float is
        live.record_batch(1, [
            submitted(1), ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit], model_version=0),
            ev.RunsFinished(task=0, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, runs=[exact],
                            payload=None, model_version=0, model_version_end=0, seconds=0.5),
        ])
        log.append(live.close_turn().writes, commit_id="c1")
        assert live.batches == LiveState(log, open_payloads(url)).batches
