"""E12: places that follow the engine's load, decided from its steps alone; and the places themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.actors.engines.interface import EngineLoad
from trinity_es.actors.runner.adaptive_places import MOST, START, AdaptivePlaces, Places


def load(running: int = 8, waiting: int = 0, kv_share: float = 0.2, preempted: int = 0, most: int = 256) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, preempted=preempted, kv_share=kv_share, most_running=most)


EASY, FULL = load(), load(running=10, waiting=54, kv_share=0.99)


def after_rounds(decide: AdaptivePlaces, rounds: int, step: EngineLoad = EASY, finished: int = 0) -> int:
    """Play rounds in which all places are taken; returns the number of units that finished."""
    for _ in range(rounds):
        finished += decide.places
        decide.after_step(step, taken=decide.places, finished=finished)
    return finished


def test_while_the_engine_has_room_and_all_places_are_taken_there_are_more_each_round() -> None:
    decide = AdaptivePlaces()
    assert decide.after_step(EASY, taken=START, finished=START - 1) == START, "the round is not over"
    assert decide.after_step(EASY, taken=START, finished=START) == START + 16
    assert decide.after_step(EASY, taken=START + 16, finished=START + 1) == START + 16, "another round begins"
    few = AdaptivePlaces(start=4)
    after_rounds(few, 1)
    assert few.places == 5, "a quarter at a time"
    after_rounds(decide, 100)
    assert decide.places == MOST


def test_places_that_nobody_takes_do_not_become_more() -> None:
    decide = AdaptivePlaces()
    for finished in range(0, 1000, 10):
        assert decide.after_step(EASY, taken=START - 1, finished=finished) == START


@pytest.mark.parametrize("step", [load(kv_share=0.95), load(running=250)], ids=["tokens", "requests"])
def test_an_engine_that_was_nearly_full_in_a_round_gets_no_more(step: EngineLoad) -> None:
    decide = AdaptivePlaces()
    decide.after_step(step, taken=START, finished=1)
    assert decide.after_step(EASY, taken=START, finished=START) == START, "how full it was counts"
    assert decide.after_step(EASY, taken=START, finished=2 * START) == START, "nor in the round before"
    assert decide.after_step(EASY, taken=START, finished=3 * START) > START


@pytest.mark.parametrize(("step", "places"), [
    (load(running=24, waiting=40, kv_share=0.99), 48),  # then as many wait as run
    (load(running=10, waiting=54, kv_share=0.99), 32),  # half at most
    (load(running=30, waiting=34, kv_share=0.99), 57),  # a tenth at least
    (load(running=48, waiting=2, kv_share=0.99, preempted=1), 57),
    (load(running=256, waiting=426), 48),  # as many requests as it takes at once
    (load(running=0, waiting=9, kv_share=1.0), 32),
])
def test_where_too_many_wait_or_some_are_put_back_there_are_fewer_at_once(step: EngineLoad, places: int) -> None:
    assert AdaptivePlaces().after_step(step, taken=START, finished=0) == places


def test_those_that_are_not_taken_are_no_reason_for_the_queue() -> None:
    assert AdaptivePlaces().after_step(FULL, taken=20, finished=0) == 10


def test_a_queue_no_longer_than_what_runs_keeps_an_engine_busy() -> None:
    for step in (load(running=32, waiting=32, kv_share=0.99), load(running=256, waiting=256)):
        decide = AdaptivePlaces()
        after_rounds(decide, 9, step)
        assert decide.places == START


def test_requests_that_wait_for_their_turn_change_nothing() -> None:
    """64 prompts come at once and are read one after the other; after a change of weights all are read again."""
    for step in (load(running=10, waiting=54), load(running=0, waiting=64, kv_share=0.0, preempted=64)):
        assert AdaptivePlaces().after_step(step, taken=START, finished=0) == START


def test_a_queue_is_answered_once_a_round() -> None:
    decide = AdaptivePlaces()
    seen = [decide.after_step(FULL, taken=max(decide.places, START - n), finished=n) for n in range(64)]
    assert seen == [32] * 32 + [16] * 16 + [8] * 8 + [4] * 4 + [2] * 2 + [1] * 2


def test_so_many_as_were_too_many_are_tried_again_after_pauses_that_grow() -> None:
    decide, finished, tried = AdaptivePlaces(start=16), 0, []
    for round_ in range(400):
        finished += decide.places
        before = decide.places
        step = load(kv_share=0.99, preempted=1) if decide.places > 16 else load(kv_share=0.85)
        if decide.after_step(step, taken=decide.places, finished=finished) < before:
            tried.append(round_)
    pauses = [b - a for a, b in pairwise(tried)]
    assert len(tried) <= 12
    assert max(pauses[-4:]) > 100, pauses


def test_a_load_that_becomes_lighter_gets_its_places_back() -> None:
    decide = AdaptivePlaces()
    finished = after_rounds(decide, 6, FULL)
    assert decide.places == 1
    after_rounds(decide, 32, finished=finished)
    assert decide.places == MOST, "and does not wait for the pauses that the heavier one was given"


STEPS = st.lists(st.tuples(
    st.builds(load, running=st.integers(0, 300), waiting=st.integers(0, 300), kv_share=st.floats(0, 1),
              preempted=st.integers(0, 3)),
    st.integers(0, 300), st.integers(0, 100),
), max_size=200)


@given(STEPS, st.integers(1, MOST))
def test_whatever_an_engine_tells_there_is_one_place_at_least_and_never_more_than_the_most(
    steps: list[tuple[EngineLoad, int, int]], start: int
) -> None:
    decide, finished = AdaptivePlaces(start), 0
    for step, taken, more in steps:
        finished += more
        before = decide.places
        after = decide.after_step(step, taken, finished)
        assert after == decide.places
        assert 1 <= after <= MOST
        assert after <= max(before, min(before + 16, before + max(1, before // 4)))
        assert after >= before or step.waiting or step.preempted


# --- with an engine that fills --------------------------------------------------------------------------------------
@dataclass
class Simulated:
    """An engine as vLLM is one: requests of so many tokens, a KV cache and as many at once as it takes."""

    capacity: int
    length: int
    most: int = 256
    running: list[int] = field(default_factory=list)
    """Tokens of each request that runs, the oldest first."""
    waiting: int = 0
    finished: int = 0

    def step(self, places: int) -> EngineLoad:
        self.waiting += max(0, places - len(self.running) - self.waiting)  # somebody always wants a place
        preempted = 0
        while self.waiting and len(self.running) < self.most and sum(self.running) + len(self.running) < self.capacity:
            self.waiting -= 1
            self.running.append(0)
        while sum(self.running) + len(self.running) > self.capacity and len(self.running) > 1:
            self.running.pop()
            self.waiting += 1
            preempted += 1
        self.running = [tokens + 1 for tokens in self.running]
        self.finished += sum(tokens >= self.length for tokens in self.running)
        self.running = [tokens for tokens in self.running if tokens < self.length]
        share = min(1.0, sum(self.running) / self.capacity)
        return EngineLoad(running=len(self.running), waiting=self.waiting, preempted=preempted, kv_share=share,
                          most_running=self.most)

    @property
    def playing(self) -> int:
        return len(self.running) + self.waiting


@settings(max_examples=10, deadline=None)
@given(capacity=st.integers(200, 2000), length=st.integers(4, 60), most=st.sampled_from([8, 32, 256]))
def test_a_load_that_stays_the_same_is_soon_left_alone(capacity: int, length: int, most: int) -> None:
    engine, decide = Simulated(capacity, length, most), AdaptivePlaces()
    seen: list[int] = []
    while engine.finished < 20_000 and len(seen) < 5_000:
        step = engine.step(decide.places)
        seen.append(decide.after_step(step, taken=min(engine.playing, decide.places), finished=engine.finished))
    late = seen[len(seen) // 2 :]
    changes = sum(a != b for a, b in pairwise(late))
    assert changes <= 40, (changes, sorted(set(late)))


# --- the places -----------------------------------------------------------------------------------------------------
async def nothing() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_become_more_and_fewer_while_units_wait_and_play() -> None:
    async def play() -> None:
        places, inside, ends = Places(2), list[int](), [asyncio.Event() for _ in range(8)]

        async def unit(n: int) -> None:
            async with places:
                inside.append(n)
                await ends[n].wait()
                inside.remove(n)

        units = [asyncio.create_task(unit(n)) for n in range(8)]
        await nothing()
        assert inside == [0, 1]
        places.resize(4)
        await nothing()
        assert inside == [0, 1, 2, 3], "at once, and those that came first"
        places.resize(1)
        units[4].cancel()
        for n in range(3):
            ends[n].set()
        await nothing()
        assert (inside, places.taken) == ([3], 1), "who was in stays, and nobody comes"
        ends[3].set()
        await nothing()
        assert inside == [5], "one that was cancelled takes no place"
        units[5].cancel()
        await nothing()
        assert inside == [5, 6] or inside == [6]
        for end in ends:
            end.set()
        await asyncio.gather(*units, return_exceptions=True)
        assert places.taken == 0

    asyncio.run(play())


def test_one_that_is_cancelled_as_it_comes_in_gives_its_place_back() -> None:
    async def play() -> None:
        places = Places(1)

        async def unit() -> None:
            async with places:
                await asyncio.sleep(0)

        await places.__aenter__()
        waits = asyncio.create_task(unit())
        await nothing()
        await places.__aexit__()  # it is let in, and has not run yet
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert places.taken == 0
        await asyncio.wait_for(unit(), 5)

    asyncio.run(play())
