"""Each decision of the coordinator, as a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.bdd import Given, given
from tests.helpers.decided import dispatched, finished, outcome, submitted, unit
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions.batch_decisions import Capacity
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchAlreadyActive, BatchNotFound, BatchTypeMismatch, DataError
from trinity_es.events.values import BatchLifecycleState, Status
from trinity_es.projections.batch import BatchState, batch_result, fold


def batch_of(*events: ev.Event) -> BatchState:
    return fold(events)


class TestSubmit:
    @pytest.mark.parametrize(("before", "submission", "then"), [
        ([], "s1", [submitted()]), ([submitted()], "s1", []),
        ([submitted(0), ev.BatchFinalizing(), ev.BatchFinalized(result={})], "s2", [submitted(submission="s2")]),
    ], ids=["a new batch", "the same request again", "a finalized id"])
    def test_p25_a_batch_is_recorded_once(self, before: list[ev.Event], submission: str, then: list[ev.Event]) -> None:
        given(*before).when(batches.submit, submitted(submission=submission)).then(*then)

    def test_p25_an_active_id_is_refused_and_a_task_without_runs(self) -> None:
        other = submitted(submission="other")
        given(submitted()).when(batches.submit, other).then_raises(BatchAlreadyActive, "already active")
        given().when(batches.submit, submitted(repeat_times=[1, 0])).then_raises(DataError, "task 1")

    def test_p25_an_empty_batch_stays_pending(self) -> None:
        case = given().when(batches.submit, submitted(0))
        assert case.state.state is BatchLifecycleState.PENDING


class TestDispatch:
    def capacity(self, name: str = "runner-0", *, load: int = 0, limit: int = 4) -> Capacity:
        return Capacity(name=name, incarnation=1, model_version=3, places=4, load=load, limit=limit)

    def failed_on_a(self) -> BatchState:
        before = [submitted(1), dispatched(unit(), runner="a")]
        failed = outcome(unit(), failed=[(0, "workflow", "x")])
        return batch_of(*before, *batches.apply_outcome(fold(before), "a", 1, failed))

    def test_units_go_out_in_order_up_to_the_limit(self) -> None:
        [(_, event)] = batches.dispatch([batch_of(submitted(6))], [self.capacity()])
        assert event == ev.TasksDispatched(
            runner="runner-0", incarnation=1, units=[unit(t) for t in range(4)], model_version=3
        )

    def test_the_lower_batch_goes_first_whatever_came_first(self) -> None:
        later, sooner = batch_of(submitted(3, batch_id=7)), batch_of(submitted(3, batch_id=2))
        chosen = batches.dispatch([later, sooner], [self.capacity()])
        assert [(b.batch_id, len(e.units)) for b, e in chosen] == [(2, 3), (7, 1)]

    @pytest.mark.parametrize(("tasks", "loads", "limit", "units"), [
        (4, {"a": 3, "b": 1}, 4, {"a": 1, "b": 3}),
        (3, {"a": 4, "b": 3}, 36, {"b": 1}),  # another runner may have a place first
        (3, {"a": 4}, 36, {"a": 3}),  # there is no other runner
        (80, {"a": 4, "b": 4}, 36, {"a": 20, "b": 20}),  # of many, each gets some beyond its places
    ])
    def test_the_least_loaded_runner_gets_the_next_unit_while_it_has_places_and_of_many_some_more(
        self, tasks: int, loads: dict[str, int], limit: int, units: dict[str, int]
    ) -> None:
        runners = [self.capacity(name, load=load, limit=limit) for name, load in loads.items()]
        chosen = batches.dispatch([batch_of(submitted(tasks))], runners)
        assert {e.runner: len(e.units) for _, e in chosen} == units

    def test_p11_a_unit_that_failed_goes_to_another_runner_if_there_is_one(self) -> None:
        batch = self.failed_on_a()
        [(_, event)] = batches.dispatch([batch], [self.capacity("a"), self.capacity("b", load=3)])
        assert (event.runner, event.units) == ("b", [unit(attempt=2)])
        [(_, event)] = batches.dispatch([batch], [self.capacity("a")])
        assert event.runner == "a"

    @pytest.mark.parametrize("infra", [False, True])
    def test_no_unit_is_blamed_for_the_end_of_a_server_until_it_was_there_each_time(self, infra: bool) -> None:
        events: list[ev.Event] = [submitted(1)]
        for attempt in range(1, 20):
            u = unit(attempt=attempt)
            events.append(dispatched(u, runner="a"))
            batch = batch_of(*events)
            done = outcome(u, failed=[(0, "infra", "it is gone")])
            [failed] = (batches.apply_outcome(batch, "a", 1, done, on_servers=True) if infra
                        else batches.lose_runner(batch, "a", 1, "it is gone", on_servers=True))
            assert failed.blamed is (attempt >= batches.MOST_SERVERS_LOST)
            events.append(failed)
            if not failed.retry:
                break
        else:
            raise AssertionError("a task that ends every server is attempted for ever")
        assert attempt == batches.MOST_SERVERS_LOST + batch.max_attempts - 1

    def test_p15_units_of_one_task_go_to_one_runner_while_it_is_not_much_fuller(self) -> None:
        batch = batch_of(submitted(4, 4, runs_per_unit=2))
        chosen = batches.dispatch([batch], [self.capacity("a"), self.capacity("b")])
        assert {e.runner: sorted((u.task, u.run_id_base) for u in e.units) for _, e in chosen} == {
            "a": [(0, 0), (0, 2), (2, 0), (2, 2)], "b": [(1, 0), (1, 2), (3, 0), (3, 2)],
        }

    def test_p15_a_unit_leaves_a_runner_that_is_much_fuller_or_has_no_place(self) -> None:
        batch = batch_of(submitted(1, 8, runs_per_unit=2))
        chosen = batches.dispatch([batch], [self.capacity("a", limit=9), self.capacity("b", limit=9)])
        assert {e.runner: [u.run_id_base for u in e.units] for _, e in chosen} == {"a": [0, 2], "b": [4, 6]}
        for tasks in (1, 80):  # of many that wait, a runner gets some beyond its places
            batch = batch_of(submitted(tasks, 4, runs_per_unit=2), dispatched(unit(runs=2), runner="a"))
            chosen = batches.dispatch([batch], [self.capacity("a", load=4, limit=9), self.capacity("b", load=3)])
            [runner] = [e.runner for _, e in chosen if unit(base=2, runs=2) in e.units]
            assert runner == "b", "it would have waited where another runner has a place"

    def test_p15_the_runner_that_had_the_tasks_first_runs_gets_the_others_too(self) -> None:
        first = unit(runs=2)
        before = [submitted(1, 4, runs_per_unit=2), dispatched(first, runner="b")]
        batch = batch_of(*before, *batches.apply_outcome(fold(before), "b", 1, outcome(first)))
        [(_, event)] = batches.dispatch([batch], [self.capacity("a"), self.capacity("b", load=1)])
        assert event.runner == "b"

    def test_p3_runs_are_split_into_units(self) -> None:
        batch = batch_of(submitted(1, 16, runs_per_unit=4))
        assert [(u.run_id_base, u.runs) for u in batch.pending.values()] == [(0, 4), (4, 4), (8, 4), (12, 4)]


FINISHED: list[ev.Event] = [submitted(1), dispatched(unit()), finished()]
REOPEN: dict[str, Any] = {"reason": "its payload is lost", "request": "r1", "runs_per_unit": None}


class TestReopen:
    def test_a_finished_task_waits_again_with_all_its_runs_and_its_attempts_are_counted_on(self) -> None:
        again = given(submitted(runs=2), dispatched(unit(runs=2), unit(1, runs=2)), finished(runs=2)).when(
            batches.reopen, 1, [0], **REOPEN
        ).then(ev.TaskReopened(task=0, units=[unit(runs=2, attempt=2)], reason="its payload is lost", request="r1",
                               finished=True, experiences=2))
        assert again.state.completed_task_count == 0
        assert again.state.tasks[0].payloads == []
        assert list(again.state.pending) == [(0, 0)]

    def test_its_runs_are_units_as_those_of_a_new_task_are(self) -> None:
        given(submitted(runs=5), dispatched(unit(runs=5)), finished(runs=5)).when(
            batches.reopen, 1, [0], **REOPEN | {"runs_per_unit": 2}
        ).then(ev.TaskReopened(
            task=0, units=[unit(base=0, runs=2, attempt=2), unit(base=2, runs=2, attempt=2), unit(base=4, attempt=2)],
            reason="its payload is lost", request="r1", finished=True, experiences=5,
        ))

    def test_a_task_that_failed_for_good_or_was_dropped_may_run_again_as_often_as_a_new_one(self) -> None:
        failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1,
                                  kind="data", message="no", retry=False)
        again = given(submitted(), dispatched(unit()), failed, ev.TaskDropped(tasks=[1], reason="enough")).when(
            batches.reopen, 1, [0, 1], **REOPEN
        ).then_types(ev.TaskReopened, ev.TaskReopened)
        assert again.state.dropped == {}
        assert [u.attempt for u in again.state.pending.values()] == [2, 1]
        assert again.state.strikes == {}

    def test_the_same_request_again_and_an_outcome_of_the_life_before_it_change_nothing(self) -> None:
        again = given(submitted(), dispatched(unit()), finished()).when(batches.reopen, 1, [0], **REOPEN)
        again.when(batches.reopen, 1, [0], **REOPEN).then()
        again.when(batches.apply_outcome, "runner-0", 1, outcome(unit())).then()

    @pytest.mark.parametrize(("events", "task", "error", "said"), [
        ([submitted(), dispatched(unit())], 0, DataError, "task 0 of batch 1 has not ended"),
        ([*FINISHED, ev.BatchFinalizing()], 0, DataError, "is being finalized"),
        ([*FINISHED, ev.BatchFinalizing(), ev.BatchFinalized(result={})], 0, DataError,
         "its result was handed out and can't change; submit the tasks again"),
        ([], 0, BatchNotFound, "batch 1 is not registered"),
        ([submitted()], 5, DataError, "it has tasks 0 to 1"),
        ([submitted(batch_type="collect"), *FINISHED[1:], ev.ResultsTaken(tasks=[0], request="t")], 0, DataError,
         "were handed out: schedule a new task"),
    ], ids=["it runs", "in the pipeline", "given out", "no batch", "no task", "taken by a scheduler"])
    def test_what_can_not_run_again_is_refused(
        self, events: list[ev.Event], task: int, error: type[Exception], said: str
    ) -> None:
        given(*events).when(batches.reopen, 1, [task], **REOPEN).then_raises(error, said)


class TestOutcome:
    def came(self, u: ev.Unit, **how: Any) -> Given:
        return given(submitted(1, u.runs), dispatched(u)).when(batches.apply_outcome, "runner-0", 1, outcome(u, **how))

    def test_all_runs_done_finishes_the_task(self) -> None:
        assert self.came(unit()).then(finished()).state.is_complete

    def test_p3_the_task_is_finished_when_its_last_unit_is(self) -> None:
        a, b = unit(base=0, runs=2), unit(base=2, runs=2)
        case = given(submitted(1, 4, runs_per_unit=2), dispatched(a, b))
        case.when(batches.apply_outcome, "runner-0", 1, outcome(b)).then_types(ev.RunsFinished)
        assert not case.state.is_complete
        case.when(batches.apply_outcome, "runner-0", 1, outcome(a)).then_types(ev.TaskFinished)
        assert case.state.statuses[0].completed_runs == 4

    @pytest.mark.parametrize(("before", "submission"), [
        ([batches.apply_outcome, "runner-0", 1, outcome(unit())], "s1"), ([lambda batch: []], "s0"),
        ([batches.lose_runner, "runner-0", 1, "gone"], "s1"),
    ], ids=["it comes twice", "of an earlier life of the id", "of a runner that was given up"])
    def test_an_outcome_that_is_not_taken_changes_nothing(self, before: list[Any], submission: str) -> None:
        case = given(submitted(1), dispatched(unit())).when(*before)
        case.when(batches.apply_outcome, "runner-0", 1, outcome(unit(), submission=submission)).then()

    def test_a_late_outcome_of_a_lost_runner_is_not_taken_for_the_new_attempt(self) -> None:
        first, second = unit(), unit(attempt=2)
        case = given(submitted(1), dispatched(first, runner="a")).when(batches.lose_runner, "a", 1, "gone")
        case = given(submitted(1), dispatched(first, runner="a"), *(case.decided or []), dispatched(second, runner="b"))
        case.when(batches.apply_outcome, "a", 1, outcome(first)).then()
        case.when(batches.apply_outcome, "b", 2, outcome(second)).then()
        case.when(batches.apply_outcome, "b", 1, outcome(second)).then_types(ev.TaskFinished)

    def test_p11_only_the_failed_runs_are_attempted_again(self) -> None:
        case = self.came(unit(runs=4), ok=[0, 2], failed=[(1, "timeout", "t"), (3, "timeout", "t")])
        case.then_types(ev.RunsFinished, ev.AttemptFailed)
        assert list(case.state.pending.values()) == [unit(base=1, attempt=2), unit(base=3, attempt=2)]

    def test_after_its_last_attempt_a_task_is_settled_as_failed(self) -> None:
        u, again = unit(), unit(attempt=2)
        case = self.came(u, failed=[(0, "workflow", "first")])
        case = given(submitted(1), dispatched(u), *(case.decided or []), dispatched(again)).when(
            batches.apply_outcome, "runner-0", 1, outcome(again, failed=[(0, "workflow", "second")])
        )
        assert case.state.is_complete
        status = case.state.statuses[0]
        assert (status.ok, status.completed_runs) == (False, 0)
        assert "first" in (status.message or "")

    @pytest.mark.parametrize(("kind", "runner", "attempt", "then"), [
        *((kind, "runner-0@b", attempt, ("infra", True, False))
          for kind in ("data", "infra") for attempt in range(1, batches.MOST_HOSTS_LACK)),
        ("data", "runner-0", 1, ("data", False, True)),
        ("data", "runner-0@b", batches.MOST_HOSTS_LACK, ("data", False, True)),
    ])
    def test_what_a_joined_host_lacks_is_attempted_elsewhere_and_what_all_lack_fails_for_good(
        self, kind: Any, runner: str, attempt: int, then: tuple[str, bool, bool]
    ) -> None:
        u = unit(attempt=attempt)
        lacks = replace(outcome(u, failed=[(0, kind, "no module sums")]), lacks=True)
        [failed] = batches.apply_outcome(fold([submitted(1), dispatched(u, runner=runner)]), runner, 1, lacks)
        assert (failed.kind, failed.retry, failed.blamed) == then

    def test_bad_data_is_not_attempted_again(self) -> None:
        assert self.came(unit(), failed=[(0, "data", "no prompt")]).state.is_complete

    def test_promise_8_a_failure_is_no_zero_reward(self) -> None:
        ok, bad = unit(0), unit(1)
        case = given(submitted(2, max_attempts=1), dispatched(ok, bad))
        case.when(batches.apply_outcome, "runner-0", 1, outcome(ok))
        case.when(batches.apply_outcome, "runner-0", 1, outcome(bad, failed=[(0, "infra", "engine died")]))
        case.when(batches.start_finalizing)
        assert "infra: engine died" in (case.state.statuses[1].message or "")
        metrics = batch_result(case.state)["metrics"]
        assert (metrics["rollout/reward/mean"], metrics["rollout/failed_task_count"]) == (1.0, 1.0)


class TestRunnerLost:
    def test_only_what_was_running_is_run_again(self) -> None:
        a, b = unit(0), unit(1)
        case = given(submitted(2), dispatched(a, b), finished(0)).when(batches.lose_runner, "runner-0", 1, "killed")
        case.then_types(ev.AttemptFailed)
        assert list(case.state.pending.values()) == [unit(1, attempt=2)]
        assert 0 in case.state.statuses

    def test_promise_10_a_task_that_kills_runners_is_failed_after_its_attempts(self) -> None:
        case = given(submitted(1), dispatched(unit()))
        case.when(batches.lose_runner, "runner-0", 1, "killed")
        case = given(submitted(1), dispatched(unit()), *(case.decided or []), dispatched(unit(attempt=2)))
        case.when(batches.lose_runner, "runner-0", 1, "killed")
        assert case.state.is_complete
        assert not case.state.statuses[0].ok

    @pytest.mark.parametrize("had", [(10, 20, 30, 30), (0,)])
    def test_promise_12_a_loss_counts_only_if_the_attempt_got_no_further_than_those_before(
        self, had: tuple[int, ...]
    ) -> None:
        history: list[ev.Event] = [submitted(1)]
        for attempt, tokens in enumerate(had, start=1):
            history.append(dispatched(unit(attempt=attempt)))
            history += batches.lose_runner(batch_of(*history), "runner-0", 1, "killed")
            assert batch_of(*history).pending, f"after attempt {attempt}"
            history.append(ev.AttemptKept(
                task=0, run_id_base=0, runs=1, attempt=attempt, runner="runner-0", incarnation=1, payload="", calls=0,
                open_calls=1, tokens=tokens, steps=0, seconds=1.0,
            ))
        history.append(dispatched(unit(attempt=len(had) + 1)))
        history += batches.lose_runner(batch_of(*history), "runner-0", 1, "killed")
        assert batch_of(*history).is_complete, "the last one kept got no further, and there are two attempts"


class TestEnd:
    def test_an_unknown_batch_is_a_key_error_and_the_wrong_type_a_value_error(self) -> None:
        case = given().when(lambda b: [batches.require_batch(b, 9, "train")])
        case.then_raises(BatchNotFound, "9").then_raises(KeyError, "9")
        case = given(submitted()).when(lambda b: [batches.require_batch(b, 1, "eval")])
        case.then_raises(BatchTypeMismatch, "finalize_train_batch").then_raises(ValueError, "finalize_train_batch")

    def test_p26_what_is_not_done_when_enough_is_done_is_dropped(self) -> None:
        case = given(submitted(3, min_wait_num=1), dispatched(unit(0), unit(1)), finished(0))
        case.when(batches.start_finalizing).then(
            ev.TaskDropped(tasks=[1, 2], reason="finalized with 1 tasks, enough"), ev.BatchFinalizing()
        )
        assert (case.state.flights, case.state.pending) == ({}, {})

    def test_p26_after_a_failed_pipeline_the_batch_runs_again_with_all_it_has(self) -> None:
        failed = ev.FinalizeFailed(error="boom")
        case = given(submitted(1), dispatched(unit()), finished(0), ev.BatchFinalizing(), failed)
        assert case.state.state is BatchLifecycleState.RUNNING
        assert case.state.is_complete

    def test_a_task_is_dropped_once_however_often_its_batch_is_finalized(self) -> None:
        dropped = ev.TaskDropped(tasks=[1], reason="finalized with 1 tasks, enough")
        failed = ev.BatchFinalizing(), ev.FinalizeFailed(error="disk full")
        before = [submitted(), dispatched(unit(0), unit(1)), finished(0), dropped, *failed]
        given(*before).when(batches.start_finalizing).then(ev.BatchFinalizing())
        given(*before).when(batches.abort, reason="enough", keep_partial_results=False).then_types(ev.BatchAborted)

    def test_p27_an_eval_ends_without_a_pipeline(self) -> None:
        case = given(submitted(1, batch_id="3/letters", batch_type="eval"), dispatched(unit()),
                     finished(0, payload=None))
        case.when(batches.start_finalizing).then_types(ev.BatchFinalized)
        assert case.state.final_result["metrics"]["eval/letters/reward/mean@1"] == 1.0

    def test_promise_6_the_result_of_an_eval_that_gave_up_a_task_is_the_fold_of_its_events(self) -> None:
        case = given(
            submitted(2, runs=2, batch_id="3/letters", batch_type="eval", min_wait_num=1),
            dispatched(unit(0, runs=2), unit(1), unit(1, base=1)), finished(0, runs=2, payload=None),
            finished(1, cls=ev.RunsFinished, payload=None),
        )
        case.when(batches.start_finalizing, return_partial=True).then_types(ev.TaskDropped, ev.BatchFinalized)
        assert case.state.final_result == batch_result(case.state)
        assert case.state.final_result["metrics"]["eval/letters/missing_run_count"] == 2.0

    def test_p28_abort_keeps_a_result_of_what_was_done(self) -> None:
        case = given(submitted(2), dispatched(unit(0), unit(1)), finished(0)).when(
            batches.abort, reason="enough", keep_partial_results=False
        )
        case.then_types(ev.TaskDropped, ev.BatchAborted)
        assert case.state.state is BatchLifecycleState.ABORTED
        assert case.state.final_result["finished_task_count"] == 1

    def test_p28_abort_of_an_unknown_or_ended_batch_changes_nothing(self) -> None:
        given().when(batches.abort, reason="x", keep_partial_results=False).then()
        given(submitted(0), ev.BatchFinalizing(), ev.BatchFinalized(result={})).when(
            batches.abort, reason="x", keep_partial_results=False
        ).then()


class TestRecovery:
    def half_done(self, **changes: Any) -> list[ev.Event]:
        return [
            submitted(3, **changes), dispatched(unit(0), unit(1)), dispatched(unit(2), runner="runner-1"), finished(0),
        ]

    def test_units_of_runners_that_are_gone_are_redone_and_the_batch_resumes(self) -> None:
        case = given(*self.half_done()).when(batches.decide_recovery, {"runner-1": 1}, version=0)
        resume, redo, failed = case.then_types(ev.RecoveryDecided, ev.RecoveryDecided, ev.AttemptFailed).decided or []
        assert (resume.decision, resume.units) == ("resume", [])
        assert resume.reason == "1 of 3 tasks are settled, 1 units run on, 0 were waiting"
        assert (redo.decision, redo.units) == ("redo", [unit(1)])
        assert "runner-0 #1" in redo.reason
        assert (failed.task, failed.kind, failed.retry, failed.blamed) == (1, "runner_lost", True, False)
        assert list(case.state.pending.values()) == [unit(1, attempt=2)]
        assert list(case.state.flights) == [(2, 0)]

    @pytest.mark.parametrize(("incarnation", "then"), [
        (2, [ev.RecoveryDecided, ev.RecoveryDecided, ev.AttemptFailed]), (1, [ev.RecoveryDecided]),
    ], ids=["a later life has nothing of the earlier one", "where every runner lives the batch just resumes"])
    def test_what_runs_on_is_that_of_lives_that_go_on(self, incarnation: int, then: list[type[ev.Event]]) -> None:
        alive = {"runner-0": incarnation, "runner-1": 1}
        given(*self.half_done()).when(batches.decide_recovery, alive, version=0).then_types(*then)

    def test_a_batch_that_was_in_the_pipeline_goes_through_it_again(self) -> None:
        case = given(submitted(1), dispatched(unit(0)), finished(0), ev.BatchFinalizing()).when(
            batches.decide_recovery, {}, version=0
        )
        case.then_types(ev.RecoveryDecided)
        assert case.decided[0].decision == "finalize"

    def test_an_empty_batch_needs_no_decision(self) -> None:
        given(submitted(0)).when(batches.decide_recovery, {}, version=0).then()

    def stale(self, version: int, alive: dict[str, int], **changes: Any) -> Any:
        return given(*self.half_done(**changes)).when(batches.decide_recovery, alive, version=version, max_staleness=2)

    def test_a_batch_with_tokens_of_too_old_weights_is_dropped(self) -> None:
        case = self.stale(3, {})
        case.then_types(ev.RecoveryDecided, ev.TaskDropped, ev.BatchAborted)
        assert case.decided[0].decision == "drop_stale"
        assert "weights 0, the current ones are 3; explorer.max_staleness is 2" in case.decided[0].reason
        assert case.decided[2].reason == f"stale: {case.decided[0].reason}"
        assert case.decided[2].result["finished_task_count"] == 1
        assert case.state.state is BatchLifecycleState.ABORTED

    def test_the_bound_itself_is_not_too_old_and_an_eval_is_never(self) -> None:
        assert self.stale(2, {}).state.state is BatchLifecycleState.RUNNING
        assert self.stale(9, {}, batch_type="eval").state.state is BatchLifecycleState.RUNNING

    def test_what_will_be_generated_again_is_not_stale_but_what_a_living_runner_makes_is(self) -> None:
        def begun(alive: dict[str, int]) -> Given:
            return given(*FINISHED[:2]).when(batches.decide_recovery, alive, version=9, max_staleness=2)

        begun({}).then_types(ev.RecoveryDecided, ev.RecoveryDecided, ev.AttemptFailed)
        begun({"runner-0": 1}).then_types(ev.RecoveryDecided, ev.TaskDropped, ev.BatchAborted)


def test_a_batch_waits_for_the_tasks_that_were_added_for_missing_groups() -> None:
    ok = Status(completed_runs=1, total_runs=1, metrics=[])
    state = BatchState(batch_id=1, batch_type="train", expected_task_count=3, min_wait_num=2, additions={"r": 2},
                       statuses={0: ok, 1: ok})
    assert not state.has_enough, "an earlier task stood in for the added one"
    state.statuses = {0: ok, 2: ok}
    assert state.has_enough
