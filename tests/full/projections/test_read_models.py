"""The read models are the log, whichever way the events came: one by one, in groups, or all at once in a rebuild."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from benchmarks.sample_log import make
from tests.helpers.handmade import cli
from tests.helpers.histories import append, history
from tests.helpers.logs import tables
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, LogError
from trinity_es.events.store.log import EventLog, Recorded, Write
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import fold
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.overview import throughput
from trinity_es.projections.tables.batch_queries import SORTS, BatchRow
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.why.system_state import Followed, RunnerSnapshot, SystemSnapshot, observe, read_snapshot


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), length=st.integers(40, 120))
def test_however_the_events_came_a_rebuild_gives_the_same_rows(
    seed: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("log") / "log.sqlite"
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        append(log, history(chance, length), lambda: chance.randint(1, 7))
        live = tables(log)
        log.rebuild()
        assert tables(log) == live
        assert_folded(log, path)


def assert_folded(log: EventLog, path: Path) -> None:
    """The rows, computed another way: from the events of each batch since it was last submitted."""
    recorded = list(log.read())
    with open_log(str(path)) as opened:
        rows = {batch_stream(row.batch_id): row for row in opened.batches()}
        latest: dict[str, list[Recorded]] = {}
        for r in recorded:
            if isinstance(r.event, ev.BatchSubmitted):
                latest[r.stream] = []
            if r.stream in latest:
                latest[r.stream].append(r)
        assert rows.keys() == latest.keys()
        published = [(r.position, r.event.version) for r in recorded if isinstance(r.event, ev.WeightsPublished)]
        losses = Counter[tuple[str, str]]()
        for stream, items in latest.items():
            row, events = rows[stream], [r.event for r in items]
            finished = [e for e in events if isinstance(e, ev.RunsFinished)]
            failed = [e for e in events if isinstance(e, ev.AttemptFailed)]
            assert row.prompt_tokens == sum(r.prompt_tokens for e in finished for r in e.runs)
            assert row.failed == len(lost_for_good(events))
            assert row.model_version == max((e.model_version_end for e in finished), default=None)
            assert row.failed_attempts == len(failed)
            assert row.dropped == sum(len(e.tasks) for e in events if isinstance(e, ev.TaskDropped))
            assert row.sent == sum(u.run_id_base == 0 and u.attempt == 1 for e in events
                                   if isinstance(e, ev.TasksDispatched) for u in e.units)
            assert row.trained_at == next((r.recorded_at for r in reversed(items)
                                           if isinstance(r.event, ev.BatchTrained)), None)
            behind = None
            for r in items:
                if isinstance(r.event, ev.BatchFinalized) and sum(n for n, _ in r.event.model_versions):
                    versions = [v for n, v in r.event.model_versions for _ in range(n)]
                    current = ([0] + [v for position, v in published if position < r.position])[-1]
                    behind = current - sum(versions) / len(versions)
            assert row.staleness == behind
            for e in events:
                losses.update(expected_losses(e))
        assert opened.losses() == dict(+losses)
        found = opened.usage()
        assert (found.delivered, found.never, found.once, found.more, found.redone) == expected_usage(recorded)


def expected_usage(recorded: Iterable[Recorded]) -> tuple[int, int, int, int, int]:
    """Delivered, never used, used once, more than once, and undone uses: experience by experience. An acknowledgement
    counts unless some of the delivery was taken before it."""
    uses: dict[tuple[str, int], list[list[tuple[bool, int | None, bool]]]] = {}
    latest: dict[str, tuple[str, int]] = {}
    queued, redone = set[tuple[str, int]](), 0
    for r in recorded:
        event = r.event
        if isinstance(event, ev.BatchFinalized) and event.result["batch_type"] == "train":
            latest[r.stream] = r.stream, r.version
            uses[r.stream, r.version] = [[] for _ in range(event.selected)]
        elif isinstance(event, ev.BatchTrained):
            for one in uses[latest[r.stream]] if r.stream in latest else ():
                one.append((False, event.step, latest[r.stream] not in queued))
        elif isinstance(event, ev.ExperiencesTaken):
            for part in event.items:
                key = batch_stream(part.batch_id), part.version
                queued.add(key)
                for one in uses[key][part.first : part.first + part.count]:
                    one.append((True, event.step, True))
        elif isinstance(event, ev.ExperiencesReturned | ev.ExperiencesRedelivered):
            again = {latest.get(batch_stream(b)) for b in getattr(event, "batches", ())}
            for key, of_batch in uses.items():
                for one in of_batch:
                    if isinstance(event, ev.ExperiencesReturned):
                        kept = [use for use in one if not (use[0] and use[1] and use[1] > event.step)]
                    else:
                        kept = [use for use in one if use[0] or key not in again]
                    redone += len(one) - len(kept)
                    one[:] = kept
    counts = [sum(counts for _, _, counts in one) for of_batch in uses.values() for one in of_batch]
    return len(counts), counts.count(0), counts.count(1), sum(n > 1 for n in counts), redone


def lost_for_good(events: Iterable[ev.Event]) -> set[int]:
    """Tasks that lost a run and were not dropped after it."""
    lost = set[int]()
    for e in events:
        if isinstance(e, ev.AttemptFailed) and not e.retry:
            lost.add(e.task)
        elif isinstance(e, ev.TaskDropped):
            lost -= set(e.tasks)
    return lost


def expected_losses(event: ev.Event) -> dict[tuple[str, str], int]:
    match event:
        case ev.AttemptFailed():
            return {("attempt", event.kind): 1}
        case ev.TaskDropped():
            return {("task", kept(event.reason)): len(event.tasks)}
        case ev.BatchFinalized():
            named = Counter[tuple[str, str]]()
            for name, uids in event.dropped_by.items():
                named["experience", kept(name)] += len(uids)
            if event.dropped > named.total():
                named["experience", ""] += event.dropped - named.total()
            return dict(named)
    return {}


def kept(value: str) -> str:
    return value[:200].replace("\0", "\ufffd")


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_s_rows_are_those_of_a_rebuild_and_of_its_batches_folds(run: Path, log: Log) -> None:
    with EventLog.open(str(run), durability="process", projectors=projectors()) as opened:
        before = tables(opened)
        assert all(before[name] for name in ("rm_batch", "rm_life", "rm_weights", "rm_load", "rm_loss", "rm_made",
                                               "rm_delivery", "rm_use"))
        opened.rebuild()
        assert tables(opened) == before
        assert_folded(opened, run)
    for row in log.batches():
        state = fold(r.event for r in log.events(row.batch_id))
        assert (row.state, row.tasks, row.dropped) == (state.state, len(state.tasks), len(state.dropped))
        assert row.failed == sum(bool(task.failed) and n not in state.dropped for n, task in enumerate(state.tasks))
        units = [u for r in log.events(row.batch_id) if isinstance(r.event, ev.TasksDispatched) for u in r.event.units]
        assert row.sent == len({unit.task for unit in units})


def test_a_log_of_an_older_release_is_told_to_be_rebuilt_and_is_made_anew_by_a_writer(path: Path) -> None:
    make(str(path), batches=2, tasks=4, payloads=False)
    with EventLog.open(str(path), durability="process", projectors=projectors()) as opened:
        before = tables(opened)
        with opened.engine.begin() as connection:  # as version 2 of the tables was
            for column in ("trained_at", "failed", "dropped", "prompt_tokens", "staleness"):
                connection.execute(text(f"ALTER TABLE rm_batch DROP COLUMN {column}"))
            for table in ("rm_life", "rm_weights", "rm_load", "rm_loss", "rm_failed_task", "rm_made", "rm_delivery",
                          "rm_use"):
                connection.execute(text(f"DROP TABLE {table}"))
            connection.execute(text("UPDATE es_checkpoint SET version = 2"))
    with open_log(str(path)) as older:
        for ask in (older.batches, older.runner_lives, older.weights, older.overview, older.usage):
            with pytest.raises(LogError, match=r"older release.*trinity-es rebuild"):
                ask()
        [problem] = older.verify()
        assert "older release" in problem
        assert older.why_open() == []  # needs none of the new tables
    with EventLog.open(str(path), durability="process", projectors=projectors()) as opened:
        assert tables(opened) == before


def test_batches_are_chosen_sorted_and_counted(log: Log) -> None:
    every = log.batches()
    assert [r.first_position for r in every] == sorted(r.first_position for r in every)
    trains = log.batches(batch_type="train", state="finalized")
    assert trains == [r for r in every if (r.batch_type, r.state) == ("train", "finalized")]
    assert {r.state for r in every} == {"finalized", "aborted"}
    assert log.count_batches() == len(every)
    assert log.count_batches(state="aborted") == sum(r.state == "aborted" for r in every) > 0
    for sort in SORTS:
        keys = [sort_key(sort, r) for r in log.batches(sort=sort)]
        known = [k for k in keys if k is not None]
        assert keys == sorted(known) + [None] * (len(keys) - len(known))
        keys = [sort_key(sort, r) for r in log.batches(sort=sort, descending=True)]
        assert keys == sorted(known, reverse=True) + [None] * (len(keys) - len(known))
    assert log.batches(sort="reward", limit=5, offset=3) == log.batches(sort="reward")[3:8]
    with pytest.raises(ValueError, match="staleness"):
        log.batches(sort="colour")


def sort_key(sort: str, row: BatchRow) -> Any:
    names = {"position": "first_position", "changed": "last_position", "submitted": "submitted_at",
             "ended": "ended_at", "step": "trained_step", "trained": "trained_at", "type": "batch_type"}
    if sort == "seconds":
        return None if row.ended_at is None else row.ended_at - row.submitted_at
    return getattr(row, names.get(sort, sort))


def test_one_batch_s_row(log: Log) -> None:
    assert log.batch_row(3) == next(r for r in log.batches() if r.batch_id == 3)
    with pytest.raises(BatchNotFound):
        log.batch_row("3")


def test_a_life_whose_end_nobody_saw_was_replaced(path: Path) -> None:
    start = [ev.RunnerStarted(runner="r", incarnation=n, pid=n, host="h", engine="vllm") for n in (1, 2)]
    more = [ev.RunnerFailed(runner="r", incarnation=2, reason="no weights"),
            ev.RunnerReady(runner="r", incarnation=2, places=1, model_version=3, load_seconds=1.0),
            ev.RunnerLost(runner="r", incarnation=2, reason="killed"),
            ev.RunnerQuarantined(runner="r", incarnation=2, deaths=3, period_seconds=60, reason="")]
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as opened:
        opened.append([Write(stream="runner/r", expected_version=0, events=[*start, *more])], commit_id="c")
    with open_log(str(path)) as read:
        first, second = read.runner_lives()
    assert (first.how, first.ended_at) == ("replaced", second.started_at)
    assert (second.how, second.reason, second.model_version) == ("quarantined", "killed", 3)


@pytest.mark.parametrize("alone", [False, True])
def test_a_life_that_ended_with_its_system_cost_nothing_while_that_was_away(tmp_path: Path, alone: bool) -> None:
    """Where the coordinator alone was away, the life went on, and what it had was lost later."""
    runner = [ev.RunnerStarted(runner="r", incarnation=n, pid=n, host="h", engine="vllm") for n in (1, 2)]
    sent = ev.TasksDispatched(runner="r", incarnation=1, units=[ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)],
                              model_version=0)
    lost = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="r", incarnation=1,
                            kind="runner_lost", message="", retry=True, blamed=False)
    start = ev.CoordinatorStarted(epoch=2, pid=1, host="h", version="", open_batches=[1])
    batch = batch_stream(1)
    commits: list[dict[str, list[ev.Event]]] = [
        {batch: [ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])], "runner/r": runner[:1]},
        {batch: [sent]},
        {"weights": [ev.WeightsPublished(version=1, method="checkpoint", path="")]},  # the last that it said
        *([{"system": [ev.SystemConfigured(config={}), start]}, {batch: [lost]}] if alone else
          [{"system": [ev.SystemConfigured(config={}), start], batch: [lost]}]),
        {"runner/r": runner[1:]},
    ]
    versions = Counter[str]()
    with EventLog.open(str(tmp_path / "log"), create=True, durability="process", projectors=projectors()) as opened:
        for commit in commits:
            opened.append([Write(stream=stream, expected_version=versions[stream], events=events)
                           for stream, events in commit.items()], commit_id=uuid.uuid4().hex)
            versions.update({stream: len(events) for stream, events in commit.items()})
            time.sleep(0.1)
        at = {type(r.event).__name__: r.recorded_at for r in opened.read()}
        with open_log(opened.url) as read:
            first, second = read.runner_lives()
            assert read.verify() == []  # which folds the tables in a database of its own
        assert (first.how, first.ended_at, second.how) == ("replaced", at["WeightsPublished"], "running")
        if not alone:
            assert re.search("━+x·+", cli("show", "1", "--log", tmp_path / "log").stdout), "it was down after the x"
            for words in (["runners"], ["runners", "r"]):
                told = cli(*words, "--log", tmp_path / "log").stdout
                assert "\nreplaced: the whole system ended unseen; for `ended` and seconds lost, its last event" in told
                assert "\ngone: the whole system ended unseen" in told
        assert (first.attempts_lost, first.seconds_lost) == (
            1, at["AttemptFailed" if alone else "WeightsPublished"] - at["TasksDispatched"])
        before = tables(opened)
        opened.rebuild()
        assert tables(opened) == before


def test_weights_are_chosen_and_counted(log: Log) -> None:
    versions = log.weights()
    assert log.count_weights() == len(versions) > 5
    assert log.weights(limit=3, offset=1) == versions[-4:-1]
    assert log.weights(version=versions[2].version) == [versions[2]]
    assert log.weights(version=999) == []


def test_versions_that_made_what_was_delivered_are_counted(log: Log) -> None:
    made: dict[int, list[tuple[str, int]]] = {}
    for recorded in log.read_rare(["BatchFinalized"], descending=True):
        for version in {v for _, v in recorded.event.model_versions}:
            here = sum(count for count, v in recorded.event.model_versions if v == version)
            made.setdefault(version, []).append((recorded.stream, here))
    assert len(made) > 5
    assert log.deliveries_by_version() == {version: sum(count for _, count in found) for version, found in made.items()}
    for version, found in made.items():
        assert log.batches_made_by(version, 2) == found[:2]


def test_the_overview_has_the_run_s_ends_its_curves_and_its_last_events(log: Log) -> None:
    seen, all_events = log.overview(recent=7), list(log.read())
    assert (seen.head, seen.first_at) == (all_events[-1].position, all_events[0].recorded_at)
    assert (seen.last_at, seen.config) == (all_events[-1].recorded_at, log.config()[1])
    assert [(p.step, p.name) for p in seen.evals] == [(n, "letters") for n in (10, 20, 30, 40)]
    assert [p.value for p in seen.staleness] == [r.staleness for r in log.batches(sort="ended")
                                                 if r.staleness is not None]
    assert [r.position for r in seen.recent] == [r.position for r in log.read_rare(limit=7, descending=True)]
    assert sum(seen.tasks_dropped.values()) == sum(row.dropped for row in log.batches())
    assert "finalized with N tasks, enough" in seen.tasks_dropped
    assert throughput([], 5.0) == []
    at_once = replace(log.batches()[0], ended_at=log.batches()[0].submitted_at)
    one = throughput([at_once], at_once.submitted_at, slices=3)  # no time has passed
    assert sum(t.tokens * t.seconds for t in one) == pytest.approx(at_once.response_tokens)


def test_distributions_are_those_of_the_chosen_batches(log: Log) -> None:
    chosen = [r.batch_id for r in log.batches(sort="ended", descending=True, limit=3)]
    finished = [r.event for b in chosen for r in log.events(b) if isinstance(r.event, ev.RunsFinished)]
    seen = log.distributions(last=3)
    assert seen.batch_ids == chosen
    assert seen.attempt_seconds == [e.seconds for e in finished]
    assert seen.rewards == [r.metrics["reward"] for e in finished for r in e.runs]
    assert seen.response_tokens == [r.response_tokens for e in finished for r in e.runs]
    assert log.distributions([3]).batch_ids == [3]
    everything = log.distributions(last=10_000)
    assert sum(everything.failures.values()) == log.overview().failed_attempts
    with pytest.raises(BatchNotFound):
        log.distributions(["no such"])


def test_what_a_batch_waits_for_is_told_from_a_runner_s_last_life_as_from_all(tmp_path: Path, path: Path) -> None:
    make(str(path), batches=30, tasks=6, seed=5, payloads=False, dead=True)
    with open_log(str(path)) as log:
        every = [r for r in log.read() if r.stream.startswith("runner/") or r.stream in ("weights", "system")]
        whole, short = observe(SystemSnapshot(), every), read_snapshot(log._events, [], Followed())
        assert len(every) > 100
        assert short.runners == whole.runners
        assert (short.weights, short.published_at, short.limit) == (whole.weights, whole.published_at, whole.limit)
        started = max(r.position for r in every if r.type == "RunnerStarted")
        early = [r for r in every if r.position <= started]  # it has said nothing else yet
    with EventLog.open(str(tmp_path / "early.sqlite"), create=True, durability="process",
                       projectors=projectors()) as copy:
        append(copy, [(r.stream, r.event) for r in early], lambda: 10)
    with open_log(str(tmp_path / "early.sqlite")) as log:
        runners = {name: replace_times(life) for name, life in observe(SystemSnapshot(), early).runners.items()}
        told = read_snapshot(log._events, [], Followed()).runners
        assert {name: replace_times(life) for name, life in told.items()} == runners
        assert {life.state for life in runners.values()} > {"started"}


def replace_times(life: RunnerSnapshot) -> RunnerSnapshot:
    """The life without its times: in a copy they are others."""
    return replace(life, since=None, progressed=None)


def test_the_last_event_of_a_stream(run: Path) -> None:
    with EventLog.open(str(run), read_only=True) as opened:
        for stream, name in (("weights", "WeightsPublished"), ("runner/runner-0", "WeightsLoaded")):
            *_, last = opened.read(stream=stream, types=[name])
            assert opened.last(stream, name) == last
            assert opened.last(stream, name, after=last.position) is None
        assert opened.last("weights", "BatchTrained") is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 train batches; runners die in it, tasks fail and are dropped."""
    path = tmp_path_factory.mktemp("run") / "log.sqlite"
    make(str(path), batches=40, tasks=6, seed=5, payloads=False)
    return path


@pytest.fixture
def log(run: Path) -> Iterable[Log]:
    with open_log(str(run)) as opened:
        yield opened
