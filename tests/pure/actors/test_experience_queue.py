"""The queue of experiences: what goes next, and the fold that says what was taken (P29)."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.live_log import LiveLog
from trinity_es.actors.coordinator.handlers.experience_queue import (
    Candidate,
    build_priority,
    choose_experiences,
    count_available,
)
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, PipelineError
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.experience_queue import (
    STREAM,
    QueueState,
    add_older,
    evolve_queue,
    find_older,
    load_queue,
    slice_refs,
)
from trinity_es.projections.tables.read_models import delivered_batches

RULES: dict[str, Any] = {"max_use_count": 2, "cooldown": 0.0}
NOT_CALLABLE = "tests.pure.actors.test_experience_queue:Nothing"


class Nothing:
    pass


class NewestOnly:
    """A priority function of a user's own: the newest delivery, at what it was told to give."""

    def __init__(self, gives: Any = 1.0) -> None:
        self.gives = gives

    def __call__(self, candidate: Candidate) -> Any:
        if self.gives == "raise":
            raise KeyError("broken")
        return None if candidate.age else self.gives


def delivered(batch_id: BatchId, count: int, *versions: tuple[int, int], eval_: bool = False) -> ev.BatchFinalized:
    return ev.BatchFinalized(
        result={"batch_id": batch_id, "batch_type": "eval" if eval_ else "train", "metrics": {}}, selected=count,
        experiences=[ev.PayloadRef(digest=f"{batch_id}", first=0, count=count)],
        model_versions=list(versions) or [(count, 0)],
    )


def queue(*events: tuple[str, ev.Event], capacity: int = 1000) -> QueueState:
    state, versions = QueueState(capacity=capacity), Counter[str]()
    for stream, event in events:
        versions[stream] += 1
        evolve_queue(state, stream, versions[stream], event)
    return state


def take(state: QueueState, n: int, *, now: float = 0.0, step: int | None = None, name: str = "linear_decay",
         args: dict[str, Any] | None = None, **rules: Any) -> list[tuple[BatchId, int, int]]:
    """What goes next as (batch, first, count), taken."""
    priority = build_priority(name, args or {})
    items = choose_experiences(state, n, now, priority=priority, **RULES | rules)
    request = f"r{len(state.requests)}"
    evolve_queue(state, STREAM, 1, ev.ExperiencesTaken(items=items, at=now, step=step, request=request))
    return [(item.batch_id, item.first, item.count) for item in items]


def batches(*counts: int, versions: tuple[int, ...] = ()) -> list[tuple[str, ev.Event]]:
    at = versions or (0,) * len(counts)
    return [(batch_stream(i), delivered(i, n, (n, at[i - 1]))) for i, n in enumerate(counts, 1)]


# --- what goes next -------------------------------------------------------------------------------------------------
def test_p29_linear_decay_takes_the_newest_weights_first_and_less_with_every_use() -> None:
    state = queue(*batches(4, 4, 4, versions=(0, 1, 3)))
    order = [take(state, 4, max_use_count=3)[0][0] for _ in range(6)]
    assert order == [3, 1 + 1, 3, 1, 2, 3]  # 3, 1, 1 (older last), 0, -1, -1
    assert [take(queue(*batches(2, 2, versions=(0, 5))), 3, args={"decay": 1.0})] == [[(2, 0, 2), (1, 0, 1)]]


def test_p29_fifo_takes_the_oldest_first_across_batches() -> None:
    state = queue(*batches(3, 3, 3, versions=(0, 5, 9)))
    assert take(state, 4, name="fifo", max_use_count=1) == [(1, 0, 3), (2, 0, 1)]
    assert take(state, 4, name="fifo", max_use_count=1) == [(2, 1, 2), (3, 0, 2)]
    assert take(state, 4, name="fifo", max_use_count=1) == [(3, 2, 1)]


def test_p29_a_batch_of_several_versions_goes_version_by_version() -> None:
    state = queue((batch_stream(1), delivered(1, 5, (2, 3), (3, 4))))
    assert take(state, 4) == [(1, 2, 3), (1, 0, 1)]


def test_p29_the_known_limit_and_noise_are_pure() -> None:
    args = {"use_count_limit": 1, "sigma": 5.0}
    state = queue(*batches(*[1] * 20))
    first = take(copy.deepcopy(state), 20, name="decay_limit_randomization", args=args)
    assert first == take(state, 20, name="decay_limit_randomization", args=args)
    assert first != sorted(first)
    assert take(state, 1, name="decay_limit_randomization", args=args) == []


def test_p29_a_priority_function_of_a_users_own() -> None:
    state = queue(*batches(2, 2))
    mine = f"{__name__}:NewestOnly"
    assert take(state, 4, name=mine) == [(2, 0, 2)]
    for gives in ("text", float("nan"), "raise"):
        with pytest.raises(PipelineError, match="priority_fn"):
            take(state, 4, name=mine, args={"gives": gives})


@pytest.mark.parametrize(("name", "args", "says"), [
    ("lifo", {}, "no priority_fn 'lifo'; known: .*fifo, linear_decay"),
    ("fifo", {"decay": 1}, "fifo can't be built with"),
    (NOT_CALLABLE, {}, "has no method __call__"),
])
def test_p29_a_priority_function_that_can_not_work_is_refused(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_priority(name, args)


def test_p29_an_experience_cools_down_before_it_is_taken_again() -> None:
    state = queue(*batches(4))
    rules = {**RULES, "cooldown": 10.0}
    assert take(state, 3, now=100.0, cooldown=10.0) == [(1, 0, 3)]
    assert count_available(state, 105.0, **rules) == 1
    assert take(state, 4, now=105.0, cooldown=10.0) == [(1, 3, 1)]
    assert count_available(state, 109.9, **rules) == 0
    assert take(state, 4, now=112.0, cooldown=10.0) == [(1, 0, 3)]


# --- the fold -------------------------------------------------------------------------------------------------------
def test_p29_what_is_freed_submitted_anew_or_over_the_capacity_leaves_the_queue() -> None:
    resubmitted = ev.BatchSubmitted(batch_id=2, batch_type="train", repeat_times=[1])
    state = queue(*batches(3, 3, 3), (batch_stream(2), resubmitted))
    assert [d.batch_id for d in state.deliveries.values()] == [1, 3]
    evolve_queue(state, "experiences", 1, ev.PayloadsFreed(batches=[1, 2], payloads=0, bytes=0))
    assert (state.size, [d.batch_id for d in state.deliveries.values()]) == (3, [3])
    state = queue(*batches(3, 3), capacity=7)
    take(state, 2, name="fifo")
    evolve_queue(state, batch_stream(3), 1, delivered(3, 4))
    assert (state.size, [d.batch_id for d in state.deliveries.values()], state.unused) == (7, [2, 3], 1)
    evolve_queue(state, batch_stream(4), 1, delivered(4, 50))  # larger than the capacity: it alone
    assert (state.size, len(state.deliveries)) == (50, 1)
    evolve_queue(state, batch_stream(5), 1, delivered(5, 4, eval_=True))
    evolve_queue(state, batch_stream(6), 1, delivered(6, 0))
    assert state.size == 50


def test_p29_slices_of_payloads() -> None:
    refs = [ev.PayloadRef(digest="a", first=10, count=3), ev.PayloadRef(digest="b", first=0, count=3)]
    found = [(r.digest, r.first, r.count) for r in slice_refs(refs, 1, 4)]
    assert found == [("a", 11, 2), ("b", 0, 2)]
    assert slice_refs(refs, 0, 6) == refs
    assert [(r.digest, r.first, r.count) for r in slice_refs(refs, 4, 1)] == [("b", 1, 1)]


Move = tuple[str, int, int]
MOVES = st.lists(
    st.tuples(st.sampled_from(["deliver", "take", "take", "take", "return", "free", "anew"]),
              st.integers(1, 6), st.integers(0, 5)),
    max_size=30,
)


@settings(max_examples=200)
@given(MOVES, st.integers(1, 3), st.sampled_from([0.0, 3.0]))
def test_p29_nothing_is_taken_more_often_than_allowed(moves: list[Move], limit: int, cooldown: float) -> None:
    """Against a model that keeps a plain list of uses for every experience."""
    state = QueueState(capacity=10_000)
    priority = build_priority("linear_decay", {})
    model: dict[tuple[int, int], tuple[int, list[tuple[float, int]]]] = {}
    submitted = 0
    for now, (what, a, b) in enumerate(moves):
        if what == "deliver":
            submitted += 1
            evolve_queue(state, batch_stream(submitted), 3, delivered(submitted, a, (min(a, b), 1), (a, 2)))
            model |= {(submitted, i): (1 if i < b else 2, []) for i in range(a)}
        elif what == "take":
            items = choose_experiences(state, a, float(now), priority=priority, max_use_count=limit, cooldown=cooldown)
            evolve_queue(state, STREAM, 1, ev.ExperiencesTaken(items=items, at=float(now), step=b, request=f"{now}"))
            got = [((i.batch_id, n), i.use_count) for i in items for n in range(i.first, i.first + i.count)]
            ready = [
                (-(version - 2.0 * len(uses)), key) for key, (version, uses) in model.items()
                if len(uses) < limit and all(at + cooldown <= now for at, _ in uses)
            ]
            assert [key for key, _ in got] == [key for _, key in sorted(ready)][:a]
            for key, use_count in got:
                model[key][1].append((float(now), b))  # type: ignore[index]  # batch ids are numbers here
                assert use_count == len(model[key][1]) <= limit  # type: ignore[index]  # the same
        elif what == "return":
            evolve_queue(state, STREAM, 1, ev.ExperiencesReturned(step=b))
            model = {k: (v, [u for u in uses if u[1] <= b]) for k, (v, uses) in model.items()}
        elif what == "free":
            evolve_queue(state, "experiences", 1, ev.PayloadsFreed(batches=[a], payloads=0, bytes=0))
            model = {k: v for k, v in model.items() if k[0] != a}
        else:
            again = ev.BatchSubmitted(batch_id=a, batch_type="train", repeat_times=[1])
            evolve_queue(state, batch_stream(a), 4, again)
            model = {k: v for k, v in model.items() if k[0] != a}
        assert state.size == len(model)
    uses = {(d.batch_id, i): int(n) for d in state.deliveries.values() for i, n in enumerate(d.use_counts)}
    assert uses == {key: len(used) for key, (_, used) in model.items()}


def plain(state: QueueState) -> Any:
    return state.size, dict(state.requests), [
        (d.batch_id, d.version, d.refs, d.model_versions.tolist(), d.use_counts.tolist(),
         np.nan_to_num(d.taken_at).tolist(), d.takes)
        for d in state.deliveries.values()
    ]


class QueueHost(LiveLog):
    def __init__(self, folder: Path, capacity: int) -> None:
        super().__init__(folder)
        self.capacity = capacity
        self.take_over()

    def take_over(self) -> None:
        self.live = LiveState(self.log, self.payloads, queue_capacity=self.capacity)

    def deliver(self, batch_id: int, count: int, *versions: tuple[int, int]) -> None:
        self.live.record_batch(batch_id, [
            ev.BatchSubmitted(batch_id=batch_id, batch_type="train", repeat_times=[1]), ev.BatchFinalizing(),
            delivered(batch_id, count, *versions),
        ])


@pytest.mark.parametrize("capacity", [1000, 9])
def test_p29_the_queue_of_a_coordinator_is_what_the_next_one_reads_from_the_log(tmp_path: Path, capacity: int) -> None:
    with closing(QueueHost(tmp_path, capacity)) as host:
        live, log = host.live, host.log
        for batch_id in range(1, 6):
            host.deliver(batch_id, 4, (2, 1), (2, batch_id))
            host.turn()
            items = [ev.TakenItem(batch_id=batch_id, version=3, first=1, count=2, use_count=1)]
            live.record(ev.ExperiencesTaken(items=items, at=1.5, step=batch_id, request=f"r{batch_id}"))
            host.turn()
        live.record(ev.ExperiencesReturned(step=4))
        host.deliver(2, 4, (2, 1), (2, 2))  # an id that is used again: what was taken of it before is over
        live.record(ev.PayloadsFreed(batches=[3], payloads=1, bytes=1))
        host.turn()
        with log.engine.connect() as connection:
            loaded = load_queue(log, delivered_batches(connection, capacity), capacity)
        assert plain(loaded) == plain(live.queue)
        assert loaded.size == (16 if capacity == 1000 else 8)
        assert loaded.deliveries["batch/5", 3].use_counts.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("capacity", [1000, 7])
def test_p29_a_queue_that_nobody_used_is_read_at_the_first_take(tmp_path: Path, capacity: int) -> None:
    with closing(QueueHost(tmp_path, capacity)) as host:
        def deliver(*batch_ids: int) -> None:
            for batch_id in batch_ids:
                host.live.find_batch(batch_id)  # as every request does
                host.deliver(batch_id, 3)
            host.turn()

        deliver(1, 2, 3, 4)
        host.take_over()
        queue = host.live.queue
        assert (queue.size, list(queue.unread)) == (0, ["batch/4", "batch/3", "batch/2", "batch/1"])
        deliver(5, 3)
        host.live.record(ev.PayloadsFreed(batches=[2], payloads=1, bytes=1))
        host.turn()
        add_older(queue, find_older(host.log, dict(queue.unread), queue.capacity - queue.size))
        wanted = [1, 4, 5, 3] if capacity == 1000 else [5, 3]
        assert [d.batch_id for d in host.live.queue.deliveries.values()] == wanted
        assert host.live.queue.size == 3 * len(wanted)
