"""What differs: two moments, two logs with one beginning, two runs. And what held a batch up, and was used twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import finished, history, unit, write
from tests.helpers.story import Story, T
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.batch import batch_result, evolve, fold
from trinity_es.projections.history import attempts, critical_path
from trinity_es.projections.reading import diff
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.experience_usage import Usage
from trinity_es.system.other_settings import settings_phrase


def grown(path: Path, *events: ev.Event, stream: str = "weights") -> Path:
    write(path, [(stream, list(events))])
    return path


@pytest.mark.parametrize("common", [0, 1, 2, 63, 64, 99, 100])
def test_the_common_prefix_is_found_in_few_looks(common: int) -> None:
    looks = 0

    def hash_at(side: int) -> object:
        def at(position: int) -> bytes:
            nonlocal looks
            looks += 1
            return b"%d" % (position if position <= common else side * 1000 + position)

        return at

    assert diff.common_prefix(hash_at(1), hash_at(2), 100) == common  # type: ignore[arg-type]
    assert looks <= 2 * 8


def test_two_moments_differ_in_what_happened_between(tmp_path: Path) -> None:
    write(tmp_path / "log", history("d" * 64))
    with open_log(str(tmp_path / "log")) as log:
        recorded = list(log.events(3))
        first, last = recorded[1].position, recorded[5].position
        before, after = (diff.readable_state(log.replay(3, p)) for p in (first, last))
    found = {c.path: (c.before, c.after) for c in diff.changes(before, after)}
    assert found["units running"] == (2, 0)
    assert found["failed attempts"] == (0, 1)
    assert found["task 0"][0].startswith("attempt 1 on runner-0 #1, weights 4")
    assert found["task 0"][1].startswith("finished, 2 of 2 runs done")
    assert list(diff.changes(after, after)) == []


def run(
    path: Path, reward: float = 0.5, prompt: str = "a", batches: int = 4, places: int = 8, ended: bool = True
) -> Path:
    """A run of batches of one task each; only batch 2 has this reward and prompt."""
    chapters: list[tuple[str, list[ev.Event]]] = [
        ("system", [ev.SystemConfigured(config={"explorer": {"max_concurrency": places}, "name": path.name})])]
    for number in range(batches):
        special = number == 2
        task = {"raw_task": {"prompt": prompt if special else "a"}}
        events: list[ev.Event] = [
            ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[2], tasks=[task],
                              submission=path.name),
            ev.TasksDispatched(runner=f"on-{path.name}", incarnation=1, units=[unit(0)], model_version=4),
            finished(0, None, reward=reward if special else 0.5),
        ]
        state = fold(events)
        done = [ev.BatchFinalized(result=batch_result(state))] if ended else []
        chapters.append((f"batch/{number}", [*events, *done]))
    write(path, chapters)
    return path


def compared(one: Path, two: Path) -> diff.RunsCompared:
    with open_log(str(one)) as first, open_log(str(two)) as second:
        assert diff.find_fork(first, second).common == 0
        return diff.compare_runs(first, second)


def test_runs_on_other_runners_at_another_time_are_the_same(tmp_path: Path) -> None:
    found = compared(run(tmp_path / "one"), run(tmp_path / "two"))
    assert found.equal
    assert [row.batch_id for row in found.same] == [0, 1, 2, 3]


def test_the_first_batch_that_differs_is_told_task_by_task(tmp_path: Path) -> None:
    found = compared(run(tmp_path / "one"), run(tmp_path / "two", prompt="b"))
    assert (found.first.batch_id, [row.batch_id for row in found.same]) == (2, [0, 1])
    assert [(c.path, c.before, c.after) for c in found.first.changes] == [("task 0.asked.raw_task.prompt", "a", "b")]
    assert found.later == []


@pytest.mark.parametrize("ended", [True, False])
def test_settings_rewards_and_missing_batches_differ(tmp_path: Path, ended: bool) -> None:
    one = run(tmp_path / "one", ended=ended)
    found = compared(one, run(tmp_path / "two", reward=0.25, batches=3, places=4, ended=ended))
    assert [(c.path, c.before, c.after) for c in found.settings] == [("explorer.max_concurrency", 8, 4)]
    assert "task 0.run 0.reward" in [c.path for c in found.first.changes]
    assert [(d.batch_id, d.changes[0].after) for d in found.later] == [(3, diff.MISSING)]


# --- what held a batch up ---------------------------------------------------------------------------------------------
def told(*timed: tuple[float, ev.Event]) -> attempts.BatchTimeline:
    story = Story()
    for at, event in timed:
        story.at(at).add("batch/1", event)
    return attempts.fold_timeline(story.recorded)


def test_a_setting_of_one_side_is_told_as_not_set() -> None:
    before, after = {"script": {"seconds": 1}}, {"script": {"tokens": 2}}
    assert settings_phrase(diff.changes(before, after)) == (
        "script.seconds was 1 and is not set, script.tokens was not set and is 2")


def submitted(tasks: int) -> ev.BatchSubmitted:
    return ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2] * tasks, tasks=[{}] * tasks,
                             max_attempts=3)


def sent(*units: ev.Unit) -> ev.TasksDispatched:
    return ev.TasksDispatched(runner="runner-1", incarnation=1, units=list(units), model_version=0)


def test_the_pieces_of_a_batchs_time_add_up_and_the_failure_is_to_blame() -> None:
    story = told(
        (0.0, submitted(2)), (1.0, sent(unit(0), unit(1))), (2.0, finished(1, None)),
        (7.0, ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-1", incarnation=1,
                               kind="timeout", message="too slow", retry=True)),
        (8.0, sent(unit(0, 2))), (12.0, finished(0, None, attempt=2)), (12.5, ev.BatchFinalizing()),
    )
    pieces = critical_path.segments(story)
    assert [p.seconds for p in pieces] == [1.0, 6.0, 1.0, 4.0, 0.5]
    assert pieces[1].fault
    held = critical_path.longest_segment(story)
    assert held.what == "task 0 attempt 1 on runner-1 #1 failed, timeout: too slow"


def test_a_system_that_was_down_is_a_piece_of_its_own() -> None:
    lost = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-1", incarnation=1,
                            kind="runner_lost", message="it did not outlive the system", retry=True, blamed=False)
    found = ev.RecoveryDecided(decision="redo", reason="runner-1 #1 had it")
    later = (81.0, sent(unit(0, 2))), (82.0, finished(0, None, attempt=2))
    story = told((0.0, submitted(1)), (1.0, sent(unit(0))), (80.0, found), (80.0, lost), *later)
    pieces = critical_path.segments(story, [(T + 0.5, T + 0.7), (T + 5.0, T + 80.0), (T + 90.0, T + 95.0)])
    assert [p.seconds for p in pieces] == [1.0, 4.0, 75.0, 1.0, 1.0]
    assert [p.what for p in pieces if p.fault] == [
        "task 0 attempt 1 on runner-1 #1 failed, runner_lost: it did not outlive the system",
        "nothing was recorded: in this time the whole system died, and was down",
    ]
    kept = ev.AttemptKept(task=0, run_id_base=0, runs=2, attempt=1, runner="runner-1", incarnation=1, payload="p",
                          calls=0, open_calls=1, tokens=5, steps=0, seconds=9.0)
    story = told((0.0, submitted(1)), (1.0, sent(unit(0))), (80.0, found), (80.0, lost), (80.0, kept), *later)
    assert [p.seconds for p in critical_path.segments(story, [(T + 5.0, T + 80.0)])] == [1.0, 9.0, 70.0, 1.0, 1.0]
    story = told((0.0, submitted(1)), (1.0, sent(unit(0))), (6.0, found), (80.0, lost), *later)
    alone = [(T + 5.0, T + 6.0)]  # its coordinator alone was away, and it was lost long after that
    assert [(p.seconds, p.fault) for p in critical_path.segments(story, alone)] == [
        (1.0, False), (79.0, True), (1.0, False), (1.0, False)]


def test_where_nothing_failed_the_longest_piece_is_named() -> None:
    story = told((0.0, submitted(1)), (9.0, sent(unit(0))), (10.0, finished(0, None)))
    held = critical_path.longest_segment(story)
    assert (held.seconds, held.what) == (9.0, "task 0 waited for a runner")


def test_a_straggler_is_told_from_what_is_usual() -> None:
    story = told((0.0, submitted(4)), (0.0, sent(*(unit(i) for i in range(4)))),
                 *((1.0, finished(i, None)) for i in range(3)), (8.0, finished(3, None)))
    held = critical_path.longest_segment(story)
    assert "task 3 attempt 1 on runner-1 #1 took 8.0 times the usual 1.00 s" in held.what


# --- what was used twice ----------------------------------------------------------------------------------------------
def used(path: Path, *later: tuple[str, ev.Event]) -> Usage:
    result = {"batch_id": 1, "batch_type": "train", "metrics": {}}
    done = ev.BatchFinalized(result=result, selected=4)
    write(path, [("batch/1", [submitted(1), sent(unit(0)), finished(0, None), done])])
    for stream, event in later:
        grown(path, event, stream=stream)
    with open_log(str(path)) as log:
        return log.usage()


def taken(first: int, count: int, step: int | None) -> tuple[str, ev.Event]:
    item = ev.TakenItem(batch_id=1, version=4, first=first, count=count, use_count=1)
    return "queue", ev.ExperiencesTaken(items=[item], at=1.0, step=step, request=f"{first}-{step}")


def test_a_batch_is_used_by_the_step_that_trained_it(tmp_path: Path) -> None:
    assert used(tmp_path / "a").never == 4
    once = used(tmp_path / "b", ("batch/1", ev.BatchTrained(step=1)))
    assert (once.delivered, once.once, once.twice) == (4, 4, [])
    twice = used(tmp_path / "c", ("batch/1", ev.BatchTrained(step=1)), ("batch/1", ev.BatchTrained(step=2)))
    [again] = twice.twice
    assert (again.first, again.count, again.steps) == (0, 4, [1, 2])


def test_what_a_trainer_that_came_back_uses_again_is_no_second_use(tmp_path: Path) -> None:
    found = used(tmp_path / "a", ("batch/1", ev.BatchTrained(step=2)),
                 ("experiences", ev.ExperiencesRedelivered(step=1, batches=[1])), ("batch/1", ev.BatchTrained(step=2)))
    assert (found.once, found.twice, found.redone) == (4, [], 4)


def test_out_of_the_queue_each_experience_counts_by_itself(tmp_path: Path) -> None:
    found = used(tmp_path / "a", taken(0, 3, 1), taken(2, 1, 2), ("batch/1", ev.BatchTrained(step=2)))
    assert (found.once, found.never, found.more) == (2, 1, 1)
    [again] = found.twice
    assert (again.batch_id, again.first, again.count, again.steps) == (1, 2, 1, [1, 2])
    back = used(tmp_path / "b", taken(0, 3, 1), taken(2, 1, 2), ("queue", ev.ExperiencesReturned(step=1)))
    assert (back.once, back.more, back.redone) == (3, 0, 1)


def test_the_event_at_a_position_is_one_or_none(tmp_path: Path) -> None:
    with EventLog.open(str(tmp_path / "log"), create=True, durability="process") as log:
        log.append([Write(stream="weights", expected_version=0, events=[ev.WeightsPublished(version=1, path="x")])],
                   commit_id="1")
    with open_log(str(tmp_path / "log")) as opened:
        assert [opened.at(p) is None for p in (-1, 0, 1, 2)] == [True, True, False, True]


def test_a_picture_goes_through_the_open_units_once() -> None:
    """Once for each task, 20,000 of them took nine minutes."""
    class Counted(dict[Any, Any]):
        asked = 0

        def items(self) -> Any:
            Counted.asked += 1
            return super().items()

    state = evolve(None, ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2] * 50, tasks=[],
                                           runs_per_unit=1))
    state.pending = Counted(state.pending)
    told = diff.readable_state(state)
    assert told["task 49"] == "attempt 1 waits for a runner; attempt 1 waits for a runner; no run done"
    assert Counted.asked == 1
