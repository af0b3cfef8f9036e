"""E12: places that follow the engine's load, decided from its steps alone; and the places themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trinity_es.actors.engines.http.server_load import parse_load
from trinity_es.actors.engines.interface import EngineLoad
from trinity_es.actors.runner.adaptive_places import MOST, START, AdaptivePlaces, Places


def load(running: int = 8, waiting: int = 0, kv_share: float = 0.2, again: int = 0, most: int = 256) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, recomputed=again, kv_share=kv_share, most_running=most)


EASY = load()
THRASHING = load(running=10, waiting=20, kv_share=0.99, again=6)
HOARDING = load(running=10, waiting=54, kv_share=0.99)


def after_rounds(decide: AdaptivePlaces, rounds: int, step: EngineLoad = EASY, finished: int = 0) -> int:
    """Play rounds in which all places are taken; returns the number of units that finished."""
    for _ in range(rounds):
        finished += decide.places
        decide.after_step(step, taken=decide.places, finished=finished)
    return finished


def test_while_the_engine_has_room_and_all_places_are_taken_there_are_twice_as_many_each_round() -> None:
    decide = AdaptivePlaces()
    assert decide.after_step(EASY, taken=START, finished=START - 1) == START, "the round is not over"
    assert decide.after_step(EASY, taken=START, finished=START) == 2 * START
    assert decide.after_step(EASY, taken=2 * START, finished=START + 1) == 2 * START, "another round begins"
    after_rounds(decide, 100, finished=START + 1)
    assert decide.places == MOST


def test_places_that_were_not_all_taken_at_any_time_of_a_round_do_not_become_more() -> None:
    decide = AdaptivePlaces()
    for finished in range(0, 1000, 10):
        assert decide.after_step(EASY, taken=START - 1, finished=finished) == START
    decide.after_step(EASY, taken=START, finished=1001)  # a batch begins
    assert decide.after_step(EASY, taken=3, finished=1200) == 2 * START, "and its end does not hide it"


@pytest.mark.parametrize(("step", "places"), [
    (load(kv_share=0.6), 96),  # by half, and it is nine tenths full
    (load(kv_share=0.88), 72),  # an eighth, as it is full
    (load(running=256, waiting=100), 72),  # of requests: a queue that keeps it busy
    (load(running=256, waiting=257), 64),  # one that is long enough
    (load(running=10, waiting=40, kv_share=0.99), 64),  # longer, but left alone: nothing goes to and fro
    (load(running=10, kv_share=0.99, again=1), 72),  # hardly anything is computed again
    (load(running=10, kv_share=0.99, again=2), 64),  # some is
    (load(running=10, kv_share=0.99, again=5), 64),
    (load(running=10, kv_share=0.99, again=6), 48),  # too much
    (load(running=10, waiting=70, kv_share=0.99), 32),  # as many as let three wait for each that runs
    (load(running=10, waiting=55, kv_share=0.99), 39),
    (load(running=1, waiting=63, kv_share=0.99), 32),  # half at a time
])
def test_what_a_round_is_answered_with(step: EngineLoad, places: int) -> None:
    decide = AdaptivePlaces()
    after_rounds(decide, 1, step)
    assert decide.places == places


def test_the_whole_round_counts_by_the_tokens_made_in_it() -> None:
    """64 prompts come at once, and a batch's last answers run alone: neither says much of the rest."""
    decide = AdaptivePlaces()
    decide.after_step(load(running=0, waiting=64), taken=START, finished=0)
    for _ in range(20):
        decide.after_step(load(running=64, kv_share=0.85), taken=START, finished=0)
    for _ in range(100):
        decide.after_step(load(running=1, kv_share=0.02), taken=1, finished=0)
    assert decide.after_step(load(running=1, kv_share=0.02), taken=1, finished=START) == 72, "not twice as many"


def test_requests_that_are_read_again_after_a_change_of_weights_change_nothing() -> None:
    decide = AdaptivePlaces()
    decide.after_step(load(running=64, kv_share=0.5, again=64_000), taken=START, finished=0)
    assert decide.after_step(load(running=64, kv_share=0.6), taken=START, finished=START) > START


def test_so_many_as_were_too_many_are_tried_again_when_the_cache_would_hold_them() -> None:
    decide = AdaptivePlaces()
    finished = after_rounds(decide, 1, THRASHING)
    assert decide.places == 48
    for _ in range(20):
        finished = after_rounds(decide, 1, load(kv_share=decide.places / 66), finished)
    assert decide.places == START - 1, "one more would fill it"
    after_rounds(decide, 1, load(kv_share=decide.places / 99), finished)
    assert decide.places > START


def test_a_load_that_becomes_lighter_gets_its_places_back_in_a_few_rounds() -> None:
    decide = AdaptivePlaces()
    finished = after_rounds(decide, 30, THRASHING)
    assert decide.places == 1, "never none"
    after_rounds(decide, 8, finished=finished)
    assert decide.places == MOST


STEPS = st.lists(st.tuples(
    st.builds(load, running=st.integers(0, 300), waiting=st.integers(0, 300), kv_share=st.floats(0, 1),
              again=st.integers(0, 900)),
    st.integers(0, 300), st.integers(0, 100),
), max_size=200)


@given(STEPS, st.integers(1, MOST))
def test_whatever_an_engine_tells_there_is_one_place_at_least_and_never_more_than_the_most(
    steps: list[tuple[EngineLoad, int, int]], start: int
) -> None:
    decide, finished, changed_at = AdaptivePlaces(start), 0, 0
    for step, taken, more in steps:
        finished += more
        before = decide.places
        after = decide.after_step(step, taken, finished)
        assert after == decide.places
        assert 1 <= after <= MOST
        assert before // 2 <= after <= max(2 * before, before + 1)
        if after != before:
            assert finished - changed_at >= before, "once a round"
            changed_at = finished


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
    put_back: int = 0
    """Tokens that requests had which were put back."""

    def step(self, places: int) -> EngineLoad:
        self.waiting += max(0, places - len(self.running) - self.waiting)  # somebody always wants a place
        again = 0
        while self.waiting and len(self.running) < self.most and sum(self.running) + len(self.running) < self.capacity:
            self.waiting -= 1
            again += self.put_back
            self.put_back = 0
            self.running.append(0)
        while sum(self.running) + len(self.running) > self.capacity and len(self.running) > 1:
            self.put_back += self.running.pop()
            self.waiting += 1
        self.running = [tokens + 1 for tokens in self.running]
        self.finished += sum(tokens >= self.length for tokens in self.running)
        self.running = [tokens for tokens in self.running if tokens < self.length]
        share = min(1.0, sum(self.running) / self.capacity)
        return EngineLoad(running=len(self.running), waiting=self.waiting, recomputed=again, kv_share=share,
                          most_running=self.most)

    @property
    def playing(self) -> int:
        return len(self.running) + self.waiting


@settings(max_examples=10, deadline=None)
@given(capacity=st.integers(200, 2000), length=st.integers(4, 60), most=st.sampled_from([8, 32, 256]))
@example(capacity=200, length=51, most=32)  # few units at once, and long ones: a round takes hundreds of steps
@example(capacity=200, length=60, most=8)
def test_a_load_that_stays_the_same_is_soon_left_alone(capacity: int, length: int, most: int) -> None:
    engine, decide = Simulated(capacity, length, most), AdaptivePlaces()
    seen: list[int] = []
    while engine.finished < 20_000 and len(seen) < 20_000:
        step = engine.step(decide.places)
        seen.append(decide.after_step(step, taken=min(engine.playing, decide.places), finished=engine.finished))
    changes = [sum(a != b for a, b in pairwise(part)) for part in (seen, seen[len(seen) // 2 :])]
    assert changes[0] <= 20, (changes, seen)
    assert changes[1] <= 2, (changes, sorted(set(seen)))


# --- what servers of others tell ------------------------------------------------------------------------------------
GAUGES = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 30.0
vllm:num_requests_running{engine="1",model_name="a } b"} 10.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 0.0
vllm:num_requests_waiting{engine="1",model_name="a } b"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.3
vllm:generation_tokens_total 1e6
"""


def test_a_server_s_gauges_are_its_load_over_all_its_engines() -> None:
    told = parse_load(GAUGES)
    assert (told.running, told.waiting, told.recomputed) == (40, 0, 0)
    assert told.share == told.kv_share == pytest.approx(0.4), "room for more requests"
    waits = parse_load(GAUGES.replace('} 0.0', '} 2.0'))
    assert (waits.waiting, waits.share) == (4, 1.0), "it runs as many as it takes"


@pytest.mark.parametrize(("running", "waiting", "fill"), [
    ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
])
def test_the_gauges_have_other_names_elsewhere(running: str, waiting: str, fill: str) -> None:
    told = parse_load(f'{running}{{model_name="m"}} 3\n{waiting} 5\n{fill} 0.25\n')
    assert told == EngineLoad(running=3, waiting=5, recomputed=0, kv_share=0.25, most_running=3)


@pytest.mark.parametrize("text", [
    "", "<html>", GAUGES.replace("kv_cache", "other"), GAUGES.replace("0.5", "NaN"), GAUGES.replace("30.0", "+Inf"),
    GAUGES.replace("30.0", "-1"), GAUGES.replace("30.0", "many"),
    GAUGES.replace('{engine="0",model_name="a } b"} 30', "{"),
], ids=range(8))
def test_text_without_numbers_that_count_is_no_load(text: str) -> None:
    assert parse_load(text) is None


# --- the places -----------------------------------------------------------------------------------------------------
async def nothing() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_become_more_and_fewer_while_units_wait_and_play() -> None:
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


@pytest.mark.parametrize(("given", "full", "count"), [("auto", False, 128), ("auto", True, 64), (64, False, 64)])
def test_places_follow_an_engine_unless_a_number_is_given_or_workers_full(given: Any, full: bool, count: int) -> None:
    places, told = Places(given), list[int]()
    engine, workers = SimpleNamespace(on_load=None), SimpleNamespace(full=full)
    places.watch(cast(Any, engine), lambda: told.append(places.count), cast(Any, workers))
    places.taken = places.finished = START
    if engine.on_load is not None:
        engine.on_load(load(waiting=3, kv_share=0.25))
    assert places.count == count
    assert told == [count] * (count != START), "it is told once"
    assert (places.kv_share, places.waiting) == ((0.25, 3) if told else (0.0, 0))


async def test_one_that_is_cancelled_as_it_comes_in_gives_its_place_back() -> None:
    places = Places(1)

    async def unit() -> None:
        async with places:
            await asyncio.sleep(0)

    await places.__aenter__()
    waits = asyncio.create_task(unit())
    await nothing()
    await places.__aexit__(None)  # it is let in, and has not run yet
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert places.taken == 0
    await asyncio.wait_for(unit(), 5)
