"""What came of a unit that is too large for a message: by the payload store into the log, and nothing is lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.live_log import LiveLog
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.weight_loading import WeightLoading
from trinity_es.actors.messages import OutcomeReport, UnitAssignment
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.runner import unit_reports
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogUnavailable
from trinity_es.projections.batch import BatchState, fold
from trinity_es.projections.verify.log import verify_log

MESSAGE = 256 * 1024


class Place(LiveLog):
    """The coordinator's part that takes outcomes, and what a runner writes for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        registry = RunnerRegistry(self.live, self, clock=lambda: 0.0)
        self.lives = RunnerLifecycle(registry, WeightLoading(registry), Dispatcher(registry))

    def submit(self, runs: int) -> UnitAssignment:
        """Have a batch of one task, all of whose runs a runner has."""
        self.live.record_batch(1, [ev.BatchSubmitted(
            batch_id=1, batch_type="eval", repeat_times=[runs], tasks=[{}], max_attempts=2, submission="s",
        )])
        unit = ev.Unit(task=0, run_id_base=0, runs=runs, attempt=1)
        self.live.record_batch(1, [ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit], model_version=0)])
        self.turn()
        return UnitAssignment(1, "s", unit, b"{}", keep_experiences=False)

    def report(self, message: OutcomeReport) -> None:
        self.lives.with_results(message, self.lives.on_outcomes)
        self.turn()

    def replayed(self) -> BatchState:
        return fold(r.event for r in self.log.read(stream="batch/1"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with closing(made):
        yield made


def done(runs: int, metrics: int) -> UnitResult:
    names = [f"reward/of_part_{n:04}" for n in range(metrics)]
    return UnitResult(results=[
        ev.RunResult(run=run, metrics={name: (run + n) / 7 for n, name in enumerate(names)}) for run in range(runs)
    ])


@pytest.mark.parametrize(("runs", "metrics"), [(256, 12), (64, 60), (1000, 2), (1, 5000), (4000, 3)])
def test_results_of_any_number_reach_the_log_and_leave_no_payload(place: Place, runs: int, metrics: int) -> None:
    item, result = place.submit(runs), done(runs, metrics)
    [outcome] = unit_reports.write_group([(item, result)], place.payloads)
    message = OutcomeReport("runner-0", 1, 1, [outcome])
    assert len(pickle.dumps(message)) < MESSAGE
    place.report(message)
    [task] = place.replayed().tasks
    assert [task.done[run] for run in range(runs)] == result.results
    assert place.replayed() == place.live.batches[1]
    assert list(place.payloads.digests()) == [], "it was for the way alone"
    place.report(message)  # its acknowledgement was lost: the results are no longer there, and nothing changes
    assert len(list(place.log.read(stream="batch/1"))) == 3
    report = verify_log(place.url)
    assert (report.problems, report.notes) == ([], [])


def test_so_do_failures_of_any_number(place: Place) -> None:
    item = place.submit(20_000)
    result = UnitResult(failures=[(run, "workflow", "ValueError: no") for run in range(20_000)])
    [outcome] = unit_reports.write_group([(item, result)], place.payloads)
    assert len(pickle.dumps(outcome)) < MESSAGE
    place.report(OutcomeReport("runner-0", 1, 1, [outcome]))
    assert place.replayed().pending[0, 0].runs == 20_000, "they are attempted again"


def test_results_that_are_lost_on_the_way_are_an_attempt_that_failed_as_infra(place: Place) -> None:
    [outcome] = unit_reports.write_group([(place.submit(1000), done(1000, 2))], place.payloads)
    place.payloads.delete(outcome.results_digest)
    place.report(OutcomeReport("runner-0", 1, 1, [outcome]))
    failed = list(place.log.read(stream="batch/1"))[-1].event
    assert (failed.kind, failed.retry, len(failed.failed_runs)) == ("infra", True, 1000)
    assert "its results are lost" in failed.message


def test_a_group_is_read_once_and_again_if_the_store_was_silent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    monkeypatch.setattr(place.live, "run_in_thread", lambda read, then: asked.append((read, then)))
    [outcome] = unit_reports.write_group([(place.submit(1000), done(1000, 2))], place.payloads)
    message = OutcomeReport("runner-0", 1, 1, [outcome])
    place.report(message)
    place.report(message)  # the runner heard nothing for five seconds
    [(_, then)] = asked
    then(LogUnavailable("the store does not answer"))
    assert place.replayed().tasks[0].done == {}
    place.report(message)
    read, then = asked[1]
    then(read())
    assert len(asked) == 2, "what is not in the log yet is not deleted"
    place.turn()
    assert len(place.replayed().tasks[0].done) == 1000
    asked[2][0]()
    assert list(place.payloads.digests()) == []


def test_beyond_what_a_database_takes_the_unit_has_failed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_reports, "LARGEST_RESULTS", 200_000)
    [outcome] = unit_reports.write_group([(place.submit(1000), done(1000, 20))], place.payloads)
    assert {kind for _, kind, _ in outcome.failures} == {"data"}
    assert "the limit is 200,000. Give each run fewer, or set explorer.max_repeat_times_per_runner" in str(
        outcome.failures[0][2])
