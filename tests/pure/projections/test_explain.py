"""`why` names what a batch waits for, since when and where, from events alone (promise 7)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.helpers.handmade import write
from tests.helpers.story import Story, T, configured, status
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.why.answer import span
from trinity_es.projections.why.explain import why
from trinity_es.projections.why.system_state import SystemSnapshot, observe


@pytest.fixture
def story() -> Story:
    return Story().add("system", configured()).runner()


@pytest.fixture
def one_left(story: Story) -> Story:
    """Seven of eight tasks finished after a second; the eighth, with runner-0, did not."""
    return story.batch().dispatch(*range(8)).at(1).finish(*range(7))


# --- units that run -------------------------------------------------------------------------------------------------
def test_a_slow_unit_is_named_with_task_runs_attempt_runner_and_limit(one_left: Story) -> None:
    seen = {"seen": T + 29, "progressed": T + 28, "finished": T + 28, "silent": 0.0}
    told = one_left.why(30, live=status(seen), system={"up": True})
    [unit] = told.waiting
    assert (unit.cause, unit.what) == ("slow", "task 7, runs 0-3, attempt 1 of 3")
    assert (unit.task, unit.attempt, unit.max_attempts) == (7, 1, 3)
    assert (unit.runner, unit.incarnation, unit.since, unit.seen, unit.limit) == ("runner-0", 1, T, T + 29, 60.0)
    assert (told.settled, told.running_units, told.pending_units, told.moved_at) == (7, 1, 0, T + 1)
    assert not told.stalled
    assert unit.text == (
        "task 7, runs 0-3, attempt 1 of 3 on runner-0 #1 for 30 s of at most 60 s: slow, not known to be hung: others "
        "took 0.2 s; its runner finished another unit 2.0 s ago, was heard of 1.0 s ago, and its engine's loop answers"
    )


def test_a_runner_that_a_new_coordinator_hears_of_has_finished_nothing_by_that(story: Story) -> None:
    none_ended = story.batch().dispatch(*range(8))
    told = none_ended.why(30, live=status({"seen": T + 29, "progressed": T + 28, "finished": 0.0}), system={"up": True})
    assert "finished another unit" not in told.sentence
    assert "was heard of 1.0 s ago" in told.sentence


OUTSIDE = "2 of its runs wait for the OpenEnv server http://h:1: refused, for 12 s; it gives up in 48 s"


@pytest.mark.parametrize(("after", "row", "cause", "words"), [
    (30.0, {"seen": T + 29, "runs_wait": OUTSIDE}, "slow", f"was heard of 1.0 s ago; {OUTSIDE}$"),
    (30.0, {"seen": T + 29, "waits_for": "an answer of http://a:1"}, "slow", "; it waits for an answer of http://a:1$"),
    (30.0, None, "slow", "its runner finished another unit 29 s ago"), (0.25, None, "running", ""),
    (40.0, {"seen": T + 39, "silent": 3.0}, "slow", "its engine's loop has not answered for 4.0 s"),
], ids=["its runs wait for what is outside", "its engine waits", "told by a log alone", "no longer than others",
        "silent for a moment"])
def test_a_unit_that_is_not_hung_says_what_is_known_of_it(
    one_left: Story, after: float, row: dict[str, Any] | None, cause: str, words: str
) -> None:
    told = one_left.why(after, **{} if row is None else {"live": status(row), "system": {"up": True}})
    assert told.cause == cause
    assert re.search(words, told.sentence)


@pytest.mark.parametrize(("after", "row", "sign"), [
    (66.0, {"seen": T + 65}, "hung: past its limit of 60 s, and nothing has stopped it"),
    (40.0, {"seen": T + 25}, "hung: its runner has given no sign of life for 15 s"),
    (40.0, {"seen": T + 39, "silent": 20.0}, "hung: the engine's loop of its runner has not answered for 21 s"),
], ids=["past its limit", "no sign of life", "a blocked loop"])
def test_a_hung_unit_looks_different_and_says_how_that_is_known(
    one_left: Story, after: float, row: dict[str, Any], sign: str
) -> None:
    told = one_left.why(after, live=status(row), system={"up": True})
    assert told.cause == "hung"
    assert sign in told.sentence
    assert told.stalled
    assert any("abort_batch" in line for line in told.sentences())


def test_the_runs_of_a_sequential_unit_have_the_limit_each(one_left: Story) -> None:
    one_left.add("system", configured(concurrent_mode="sequential"))
    assert one_left.why(200).waiting[0].limit == 240.0
    assert one_left.why(200).cause == "slow"
    assert one_left.why(250).cause == "hung"


def test_hung_units_come_first_then_the_oldest(story: Story) -> None:
    story.runner("runner-1", 2).batch().dispatch(0).at(5).dispatch(1, runner="runner-1", incarnation=2)
    story.at(9).dispatch(2)
    rows = {"seen": T + 30}, {"runner": "runner-1", "incarnation": 2, "seen": T + 10}
    told = story.why(30, live=status(*rows), system={"up": True})
    assert [(w.cause, w.task) for w in told.waiting[:3]] == [("hung", 1), ("running", 0), ("running", 2)]


def test_an_attempt_that_is_not_the_first_says_why(story: Story) -> None:
    story.batch(tasks=1).dispatch(0).at(2).fail(0, message="it\x1b[2J\nbroke").at(3).dispatch(0, attempt=2)
    [unit] = story.why(5).waiting
    assert unit.what == "task 0, runs 0-3, attempt 2 of 3"
    assert unit.since == T + 3
    assert unit.text.endswith("(before it: workflow: it [2J broke)")


def test_an_attempt_that_ended_with_its_runner_is_none_of_those_that_count(story: Story) -> None:
    story.batch(tasks=1).dispatch(0)
    for attempt in (2, 3):
        story.fail(0, attempt=attempt - 1, kind="runner_lost", blamed=False).dispatch(0, attempt=attempt)
    assert story.why(5).waiting[0].what == "task 0, runs 0-3, attempt 3 (the 1st of 3 that count)"
    story.fail(0, attempt=3)
    [unit] = story.why(5).waiting
    assert unit.what == "task 0, runs 0-3, attempt 4 (the 2nd of 3 that count)"
    story.dispatch(0, attempt=4)
    [unit] = story.why(5).waiting
    assert unit.text.startswith("task 0, runs 0-3, attempt 4 (the 2nd of 3 that count) on runner-0 #1 for ")
    assert (unit.attempt, unit.charged_attempt, unit.max_attempts) == (4, 2, 3)
    assert " (the task's first failure: runner_lost: " in unit.text


def test_a_unit_that_goes_on_says_from_what_and_has_less_time(story: Story) -> None:
    story.batch(tasks=1).dispatch(0, runner="runner-2").fail(0, kind="runner_lost", blamed=False, runner="runner-2")
    story.add("batch/3", ev.AttemptKept(
        task=0, run_id_base=0, runs=4, attempt=1, runner="runner-2", incarnation=1, payload="d", calls=2, open_calls=1,
        tokens=3840, steps=1, seconds=20.0,
    ))
    [unit] = story.at(3).dispatch(0, attempt=2).why(5).waiting
    assert unit.limit == 40.0
    assert unit.text.endswith(
        "; it goes on from 3,840 tokens of 2 whole answers and 1 partial answer and 1 step result, kept by runner-2 #1"
    )


def test_a_task_that_failed_names_the_failure_that_ended_it_before_the_first(story: Story) -> None:
    story.batch(tasks=1).dispatch(0).fail(0, kind="runner_lost", blamed=False).dispatch(0, attempt=2)
    story.add("batch/3", ev.AttemptFailed(
        task=0, run_id_base=0, failed_runs=[0, 1, 2, 3], attempt=2, runner="runner-0", incarnation=1, kind="timeout",
        message="took more than 60 s", retry=False,
    ), ev.BatchFinalizing(), ev.BatchFinalized(result={}))
    assert "0/4 runs completed. Given up after: timeout: took more than 60 s. First error: runner_lost: " in (
        story.why(100).sentence)


# --- units that no runner takes -------------------------------------------------------------------------------------
def test_a_runner_that_loads_its_engine_is_named() -> None:
    started = ev.RunnerStarted(runner="runner-0", incarnation=1, pid=1, host="here", engine="vllm")
    story = Story().add("system", configured()).batch().add("runner/runner-0", started)
    told = story.why(45)
    assert (told.cause, told.waiting[0].runner, told.waiting[0].since) == ("loading", "runner-0", T)
    assert told.sentence == (
        "task 0, runs 0-3, attempt 1 of 3 and 7 more units without a runner: runner-0 #1 is loading its engine, for "
        "45 s now"
    )
    assert not told.stalled
    assert story.why(130).stalled, "longer than stall_after"


def test_a_runner_that_loads_weights_is_named_with_both_versions(story: Story) -> None:
    story.at(10).add("weights", ev.WeightsPublished(version=6, path="ckpt/6")).batch()
    told = story.why(22)
    assert told.cause == "weights"
    assert "runner-0 #1 is loading weights version 6, published 12 s ago; it has version 0" in told.sentence
    loaded = ev.WeightsLoaded(runner="runner-0", incarnation=1, version=6, seconds=12.0)
    assert story.at(22).add("runner/runner-0", loaded).why(22).cause == "dispatch"


def test_a_runner_that_could_not_load_a_version_serves_on(story: Story) -> None:
    failed = ev.WeightsFailed(runner="runner-0", incarnation=1, version=6, error="no such file")
    story.add("weights", ev.WeightsPublished(version=6, path="ckpt/6")).add("runner/runner-0", failed).batch()
    assert story.why(22).cause == "dispatch"


@pytest.mark.parametrize(("event", "cause", "words"), [
    (ev.RunnerFailed(runner="runner-0", incarnation=1, reason="CUDA out of memory"), "failed", "CUDA out of memory"),
    (ev.RunnerQuarantined(runner="runner-0", incarnation=1, deaths=4, period_seconds=600.0, reason="process 7 ended"),
     "quarantined", "4 lives ended within 600 s, the last: process 7 ended"),
    (ev.RunnerRetired(runner="runner-0", incarnation=1), "ended", "runner-0 #1 was ended"),
], ids=["failed", "quarantined", "retired"])
def test_a_runner_that_needs_a_person_stalls_the_batch(story: Story, event: ev.Event, cause: str, words: str) -> None:
    told = story.batch().at(5).add("runner/runner-0", event).why(10)
    assert told.cause == cause
    assert words in told.sentence
    assert told.waiting[0].person
    assert told.stalled
    assert "what to do:" in str(told)


def test_a_quarantined_runner_beside_one_that_serves_is_no_stall(story: Story) -> None:
    story.runner("runner-1", 2).batch(tasks=9).dispatch(*range(8))
    gone = ev.RunnerQuarantined(runner="runner-1", incarnation=2, deaths=4, period_seconds=600.0, reason="no memory")
    told = story.add("runner/runner-1", gone).why(10)
    assert [w.cause for w in told.waiting] == ["running"] * 8 + ["places", "quarantined"]
    assert not told.stalled


def test_a_lost_runner_says_when_it_comes_again(story: Story) -> None:
    story.batch().at(4).add("runner/runner-0", ev.RunnerLost(runner="runner-0", incarnation=1, reason="pid 7 ended"))
    child = {"name": "runner-0", "state": "waiting", "incarnation": 1, "restart_in": 3.0, "reason": "pid 7 ended"}
    told = story.why(5, live=status({"state": "lost", "reason": "pid 7 ended"}, children=[child]), system={"up": True})
    assert told.cause == "lost"
    assert told.sentence.endswith("runner-0 #1 was lost (pid 7 ended) and is started again in 3.0 s")
    assert not told.stalled


def test_the_guardian_knows_of_a_quarantine_before_the_log_does(story: Story) -> None:
    child = {"name": "runner-0", "state": "quarantined", "incarnation": 4, "reason": "pid 9 ended"}
    told = story.batch().why(5, live=status({}, children=[child]), system={"up": True})
    assert (told.cause, told.waiting[0].incarnation) == ("quarantined", 4)
    assert "pid 9 ended" in told.sentence


def test_units_without_a_place_say_who_has_the_places(story: Story) -> None:
    story.batch(2).batch(3).at(1).dispatch(*range(6), batch=2).dispatch(0, 1)
    told = story.why(3)
    place = next(w for w in told.waiting if w.cause == "places")
    assert place.text == (
        "task 2, runs 0-3, attempt 1 of 3 and 5 more units without a place: all 8 places of 1 runner are taken "
        "(batch 2: 6, batch 3: 2)"
    )
    assert place.since == T


def test_units_sent_ahead_are_told_apart_from_places(story: Story) -> None:
    told = story.batch(2, tasks=12).batch(3).at(1).dispatch(*range(10), batch=2).why(3)
    place = next(w for w in told.waiting if w.cause == "places")
    assert place.text.endswith("all 8 places of 1 runner are taken (batch 2: 10; 2 units more than places, sent ahead)")


def test_a_unit_waits_for_another_runner_than_the_one_it_failed_on(story: Story) -> None:
    story.batch(tasks=1).dispatch(0).at(2).fail(0).runner("runner-1", 2).batch(4)
    for task in range(8):
        story.dispatch(task, batch=4, runner="runner-1", incarnation=2)
    told = story.why(3)
    assert (told.cause, told.waiting[0].since) == ("elsewhere", T + 2)
    assert "without another runner: the last attempt failed on runner-0" in told.sentence


def test_without_any_runner_that_is_said() -> None:
    assert "none has started yet" in Story().batch().why(1).sentence


# --- the batch as a whole -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("events", "after", "cause", "words"), [
    ([ev.BatchFinalizing()], 32, "finalizing", "it is finalizing: its pipeline has been running for 30 s"),
    ([ev.BatchFinalizing(), ev.FinalizeFailed(error="operator grpo: no rewards")], 500, "finalize_failed",
     ".*operator grpo: no rewards.*"),
    ([], 9999, "finalize", "all its tasks are settled, but finalize_train_batch has not been called"),
], ids=["it is finalizing", "its pipeline failed", "it waits for its trainer"])
def test_a_batch_whose_tasks_are_settled_says_what_it_waits_for_and_is_never_stalled(
    one_left: Story, events: list[ev.Event], after: float, cause: str, words: str
) -> None:
    told = one_left.finish(7).at(2).add("batch/3", *events).why(after)
    assert told.cause == cause
    assert re.fullmatch(words, told.sentence)
    assert told.waiting[0].since == (T + 2 if events else T + 1)
    assert not told.stalled


def test_enough_is_told_from_all_and_a_trainer_that_waits_from_one_that_does_not(story: Story) -> None:
    story.batch(min_wait_num=6).dispatch(*range(8)).at(1).finish(*range(7))
    told = story.why(5)
    assert [w.cause for w in told.waiting] == ["finalize", "slow"]
    assert "7 of 8 tasks are settled, enough" in told.sentence
    waited = status({"seen": T + 5}, batches=[{"batch_id": 3, "waited_for": 1}])
    assert story.why(5, live=waited, system={"up": True}).cause == "grace"
    waited["batches"][0]["must_end"] = True
    told = story.why(5, live=waited, system={"up": True}).waiting[0].text
    assert told == ("7 of 8 tasks are settled, enough; the trainer waits for a task that was cut as often as it may be "
                    "(synchronizer.in_flight)")


def test_of_a_batch_that_ended_the_failed_tasks_are_told(one_left: Story) -> None:
    failed = ev.AttemptFailed(task=7, run_id_base=0, failed_runs=[0, 1, 2, 3], attempt=1, runner="runner-0",
                              incarnation=1, kind="grader", message="the grader mine:share did not end", retry=False)
    one_left.at(2).add("batch/3", failed, ev.BatchFinalizing(), ev.BatchFinalized(result={}), ev.BatchTrained(step=12))
    assert one_left.why(100).sentence == (
        "it was trained in step 12: it waits for nothing; 1 task of 8 failed at least in part, the first is task 7: "
        "0/4 runs completed. First error: grader: the grader mine:share did not end")


def test_of_a_batch_that_failed_whole_the_way_out_is_told_without_frames(story: Story) -> None:
    failed = ev.AttemptFailed(
        task=0, run_id_base=0, failed_runs=[0, 1, 2, 3], attempt=1, runner="runner-0", incarnation=1, kind="workflow",
        message="KeyError: 'stok'\nTraceback (most recent call last):\n  File \"/x/mine.py\", line 9, in run",
        retry=False)
    story.batch(tasks=1).dispatch(0).add("batch/3", failed, ev.BatchFinalizing(), ev.BatchFinalized(result={}))
    told = story.why(100)
    assert (told.cause, told.stalled) == ("all_failed", False)
    assert told.sentence.endswith(
        "each of its runs failed, the first of task 0: 0/4 runs completed. First error: workflow: "
        "KeyError: 'stok' (mine.py:9 in run)")
    assert not any("restart-runner" in line for line in told.sentences()), "whether its system runs is not known"
    up = story.why(100, live=status({"seen": T + 100}), system={"up": True})
    assert any("restart-runner" in line for line in up.sentences())


def test_finalized_and_trained_and_aborted_are_ends(one_left: Story) -> None:
    one_left.finish(7).at(2).add("batch/3", ev.BatchFinalizing(), ev.BatchFinalized(result={}))
    told = one_left.why(100, system={"up": False})
    assert (told.state, told.cause, told.stalled) == ("finalized", "training", False)
    one_left.add("batch/3", ev.BatchTrained(step=12))
    assert "trained in step 12" in one_left.why(100).sentence
    one_left.batch(9).add("batch/9", ev.BatchAborted(reason="no longer wanted", result={}))
    told = one_left.why(100, 9)
    assert (told.cause, told.sentence) == ("nothing", "it was aborted: no longer wanted")


def test_an_unknown_batch_is_an_error(story: Story) -> None:
    with pytest.raises(BatchNotFound):
        story.why(1, 99)


# --- the system as a whole ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("system", "causes", "words", "stalled"), [
    ({"up": False, "pid": 4711, "host": "node-3"}, ["no_system", "interrupted"],
     r"its processes are gone \(coordinator pid 4711 on node-3\)", True),
    ({"up": False, "released": True}, ["no_system", "interrupted"], r"it has ended \(guardian.log says why\)", True),
    ({"up": False, "released": False, "copied_from": "node-3 /runs/log.sqlite"}, ["no_system", "interrupted"],
     "it is a copy of node-3 /runs/log.sqlite, and the system in it belongs to the original", True),
    ({"up": True, "ends": "process 5, which had started it, has ended"}, ["ending", "interrupted"],
     "^the actor system ends: process 5, which had started it, has ended$", True),
    ({"up": False, "pid": 1, "kept": 42}, ["restarting", "interrupted"], r"keeper \(pid 42\)", False),
], ids=["it died", "it was ended in order", "it is a copy", "it ends with its owner", "its keeper starts it again"])
def test_a_system_that_does_not_run_is_said_first_with_the_way_out_where_a_person_is_needed(
    one_left: Story, system: dict[str, Any], causes: list[str], words: str, stalled: bool
) -> None:
    told = one_left.why(100, system=system)
    assert [w.cause for w in told.waiting] == causes
    assert re.search(words, told.sentence)
    assert told.waiting[0].since == T + 1
    assert told.waiting[1].text == "task 7, runs 0-3, attempt 1 of 3 was on runner-0 #1 when the system ended"
    assert (told.stalled, "trinity-es up CONFIG" in str(told)) == (stalled, stalled)


def test_what_a_run_left_open_is_gone_on_with_by_resume(one_left: Story) -> None:
    one_left.add("taskset/sums", ev.TasksetAdvanced(taskset="sums", batch_id=3, epoch=0, offset=8))
    told = str(one_left.why(100, system={"up": False}))
    assert "what to do: `trinity-es resume CONFIG` goes on with the run" in told
    assert "trinity-es up" not in told


def test_a_system_without_a_coordinator_or_without_an_answer_is_named(one_left: Story) -> None:
    children = [{"name": "coordinator", "state": "waiting", "restart_in": 2.0, "reason": "process 5 ended"}]
    alone = {"system": {"children": children}, "batches": [], "runners": []}
    told = one_left.why(5, live=alone, system={"up": True})
    assert told.cause == "no_coordinator"
    assert "(process 5 ended): it is started in 2.0 s" in told.sentence
    told = one_left.why(5, live=None, system={"up": True})
    assert (told.cause, told.stalled) == ("no_answer", True)
    fenced = status() | {"system": {"children": [], "fenced": "pid 9 on node-2"}}
    told = one_left.why(5, live=fenced, system={"up": True})
    assert (told.cause, told.stalled) == ("fenced", True)
    assert "node-2" in told.sentence


# --- its forms ------------------------------------------------------------------------------------------------------
def test_the_fold_may_read_stream_by_stream(one_left: Story) -> None:
    streams = dict.fromkeys(r.stream for r in one_left.recorded)
    situation = SystemSnapshot()
    for stream in streams:
        observe(situation, (r for r in one_left.recorded if r.stream == stream))
    assert why(situation, 3, now=T + 30) == one_left.why(30)


def test_a_batch_that_begins_anew_forgets_what_was(one_left: Story) -> None:
    told = one_left.at(50).batch(tasks=2).why(51)
    assert (told.tasks, told.settled, told.pending_units, told.moved_at) == (2, 0, 2, T + 50)


def test_a_stall_that_was_recorded_moves_nothing(one_left: Story) -> None:
    one_left.at(150).add("batch/3", ev.StallDetected(waiting_on="x", since=T + 1))
    assert one_left.why(200).moved_at == T + 1


def test_only_some_are_told_to_a_person_and_all_in_the_json(story: Story) -> None:
    told = story.batch().dispatch(*range(8)).why(3)
    assert "  and 3 more like these" in str(told).splitlines()
    json = orjson.loads(orjson.dumps(told.as_dict()))
    assert len(json["waiting"]) == 8
    assert json["sentences"] == told.sentences()
    assert json["stalled"] is False


def test_the_key_of_a_cause_stays_while_only_time_goes_by(one_left: Story) -> None:
    early, late = one_left.why(0.25), one_left.why(30)
    assert (early.cause, late.cause) == ("running", "slow")
    assert early.waiting[0].key == late.waiting[0].key != one_left.why(90).waiting[0].key


@pytest.mark.parametrize(("seconds", "text"), [
    (-1.0, "0.0 s"), (0.25, "0.2 s"), (59.6, "60 s"), (119, "119 s"), (150, "2 min 30 s"), (7200, "2 h"),
    (200_000, "2 d 7 h"),
])
def test_a_length_of_time_reads_well(seconds: float, text: str) -> None:
    assert span(seconds) == text


# --- from a log -----------------------------------------------------------------------------------------------------
def test_a_log_explains_a_dead_system_by_itself(one_left: Story, tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    write(path, [(r.stream, [r.event]) for r in one_left.recorded])
    with open_log(str(path)) as log:
        told = log.why(3)
        assert [w.cause for w in told.waiting] == ["no_system", "interrupted"]
        assert [w.batch_id for w in log.why_open()] == [3]
        with pytest.raises(BatchNotFound, match=r"no batch 4"):
            log.why(4)
