"""trinity_es.run.sync_policy: when a step may be submitted and when weights come in, for every sync style."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_es.run.progress_signals import RunProgress
from trinity_es.run.sync_policy import SyncPolicy, evals_due


def last_submittable(course: SyncPolicy, *, done: int, trained: int) -> int:
    step = 0
    while course.may_submit(step + 1, done=done, trained=trained):
        step += 1
    return step


@pytest.mark.parametrize(("interval", "offset", "expected"), [
    (1, 0, {0: 1, 1: 2, 7: 8}),
    (2, 0, {0: 2, 2: 4, 4: 6}),
    (1, 1, {0: 2, 1: 3, 2: 4}),
    (2, 1, {0: 3, 2: 5, 4: 7}),
    (2, 3, {0: 5, 2: 7}),
])
def test_p34_fixed_generates_a_period_and_offset_ahead(interval: int, offset: int, expected: dict[int, int]) -> None:
    course = SyncPolicy(interval=interval, offset=offset)
    assert {done: last_submittable(course, done=done, trained=done) for done in expected} == expected
    assert [v for v in range(1, 7) if course.publishes(v)] == list(range(interval, 7, interval))


@given(interval=st.integers(1, 5), offset=st.integers(0, 5), steps=st.integers(1, 30))
def test_p34_fixed_never_stands_still_and_each_step_has_one_version(interval: int, offset: int, steps: int) -> None:
    """Whoever is fast: all steps that may be submitted are, or only those that must be; versions come out the same."""
    course = SyncPolicy(interval=interval, offset=offset)
    done, submitted, from_version = 0, 0, {}
    while submitted < steps or done < steps:
        while submitted < steps and course.may_submit(submitted + 1, done=done, trained=done):
            submitted += 1
            from_version[submitted] = done
        due = next(v for v in range(done + 1, steps + 1) if course.publishes(v) or v == steps)
        assert submitted >= min(course.generated_before(due), steps), "weights wait for steps that wait for weights"
        done = due
    for step, version in from_version.items():
        assert version == max(0, step - 1 - offset) // interval * interval


@pytest.mark.parametrize("style", ["fully_async", "trainer_driven"])
def test_p34_async_styles_keep_so_many_in_flight_and_wait_for_no_weights(style: str) -> None:
    course = SyncPolicy(style=style, max_inflight=2, interval=4)  # type: ignore[arg-type]  # one of the two literals
    assert [last_submittable(course, done=0, trained=t) for t in (0, 1, 5)] == [2, 3, 7]
    assert course.generated_before(4) == 4


def test_without_a_trainer_a_period_is_over_when_it_is_generated() -> None:
    course = SyncPolicy(interval=2, offset=1)
    assert [course.done_by(g, ended=False) for g in range(7)] == [0, 0, 0, 2, 2, 4, 4]
    assert course.done_by(5, ended=True) == 5


def due(done: int, submitted: list[int | str], interval: int = 2, on_startup: bool = True) -> list[int | str]:
    return evals_due(done, interval=interval, on_startup=on_startup, names=["a", "b"], submitted=submitted)


def test_p32_evals_are_due_once_where_a_multiple_of_the_interval_was_passed() -> None:
    assert due(0, []) == ["0/a", "0/b"]
    assert due(0, [], on_startup=False) == []
    assert due(0, ["0/a"]) == ["0/b"]  # the explorer died between the two
    assert due(1, ["0/a", "0/b"]) == []
    assert due(2, ["0/a", "0/b"]) == ["2/a", "2/b"]
    assert due(3, ["2/a"]) == []
    assert due(5, ["0/a", "2/a"]) == ["5/a", "5/b"]  # 4 was passed
    assert due(6, ["nightly"], interval=0) == []
    assert due(6, ["nightly", "x/y"]) == ["6/a", "6/b"]


async def test_a_standing_wakes_whoever_waits_for_it() -> None:
    standing = RunProgress()
    waiting = asyncio.create_task(standing.until(lambda: standing.trained >= 2 and standing.evals_over))
    for change in ({"trained": 1}, {"trained": 2, "evals": {"0/a": False}}):
        standing.note(**change)  # type: ignore[arg-type]  # a dict of several types
        await asyncio.sleep(0.01)
        assert not waiting.done()
    standing.note(evals={"0/a": True})
    await asyncio.wait_for(waiting, 5)
