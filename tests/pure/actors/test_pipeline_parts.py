"""A large batch that goes through its operators in parts gives what it gives as a whole, to the bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.payloads_in_memory import Memory, put
from trinity_es.actors.coordinator.delivery.advantages import Operated
from trinity_es.actors.coordinator.delivery.group_metrics import GroupMetrics
from trinity_es.actors.coordinator.delivery.pipeline import Pipeline, StalenessLimit
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob, PipelineThread
from trinity_es.events.experience import EID, Experience
from trinity_es.events.store.payloads import experiences as stored
from trinity_es.events.vocabulary import PayloadRef

BY_TASK: list[dict[str, Any]] = [
    {"name": "grpo"}, {"name": "grpo", "args": {"std_threshold": 0.1}}, {"name": "reinforce"}, {"name": "opmd"},
    {"name": "asymre"}, {"name": "rec", "args": {"drop": "balance"}}, {"name": "reward_std_filter"},
    {"name": "reward_filter", "args": {"threshold": 1.0}}, {"name": "dapo_dynamic_sampling"},
    {"name": "mask_response_truncated"}, {"name": "invalid_reward_filter"}, {"name": "dedup"},
]
WHOLE: list[dict[str, Any]] = [
    {"name": "grpo", "args": {"std_cal_level": "batch"}}, {"name": "dedup", "args": {"scope": "batch"}},
    {"name": "grpo", "args": {"std_threshold": 0.1, "duplicate_experiences": True}}, {"name": "step_wise_grpo"},
    {"name": "pass_rate_calculator"}, {"name": "reward_shaping_mapper"},
]


def batch(seed: int, tasks: int, unrewarded: float) -> tuple[Memory, list[PayloadRef]]:
    """Return payloads whose units were finished in any order, and their refs in the order of tasks."""
    draw, store = random.Random(seed), Memory()
    units = [
        [Experience(
            eid=EID(1, task, run, 0, f"s{task}-{run}"), tokens=[1, 2, 3, draw.randrange(3)], prompt_length=2,
            reward=None if draw.random() < unrewarded else draw.choice([0.0, 0.5, 1.0, 2.0]),
            truncate_status=draw.choice(["", "response_truncated"]) or None, info={"model_version": draw.randrange(3)},
        ) for run in range(draw.randrange(1, 5))]
        for task in range(tasks)
    ]
    finished = [(task, part) for task, runs in enumerate(units) for part in (runs[:2], runs[2:]) if part]
    draw.shuffle(finished)
    refs: list[tuple[int, int, PayloadRef]] = []
    while finished:
        group = [finished.pop() for _ in range(min(len(finished), draw.randrange(1, 4)))]
        [ref], first = put(store, [e for _, part in group for e in part]), 0
        for task, part in group:
            refs.append((task, part[0].eid.run, PayloadRef(digest=ref.digest, first=first, count=len(part))))
            first += len(part)
    return store, [ref for _, _, ref in sorted(refs, key=lambda r: r[:2])]


def processed(
    store: Memory, refs: list[PayloadRef], operators: list[dict[str, Any]], part_size: int | None, **job: Any
) -> PipelineDone | str:
    """Return the result of a job, without times, or its error."""
    thread = PipelineThread(operators, store, lambda call: call())  # type: ignore[arg-type]
    thread.most_at_once, thread.part_size = (10**9, 1) if part_size is None else (0, part_size)
    try:
        done = thread._process(PipelineJob(refs, lambda _: None, **job))
    except Exception as e:
        return str(e)
    times = {name for name in done.metrics if name.endswith("/time") or "/time/" in name}
    assert times
    return dataclasses.replace(done, metrics={k: v for k, v in done.metrics.items() if k not in times})


@given(
    seed=st.integers(0, 10**6), tasks=st.integers(1, 12), part_size=st.integers(1, 12),
    operators=st.lists(st.sampled_from(BY_TASK), max_size=3), unrewarded=st.sampled_from([0.0, 0.1, 0.9]),
    may_refer=st.booleans(), limit=st.sampled_from([None, StalenessLimit(1, 3, {})]), min_groups=st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_parts_give_what_the_whole_batch_gives(
    seed: int, tasks: int, part_size: int, operators: list[dict[str, Any]], unrewarded: float, may_refer: bool,
    limit: StalenessLimit | None, min_groups: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "PER_PAYLOAD", 5)
        store, refs = batch(seed, tasks, unrewarded)
        options = {"may_refer": may_refer, "limit": limit, "min_groups": min_groups}
        whole = processed(store, refs, operators, None, **options)
        assert processed(store, refs, operators, part_size, **options) == whole


def sizes_of_calls(operators: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many experiences each call of `Pipeline.process` got, of a batch in parts of 8."""
    store, refs = batch(1, 40, 0.0)
    sizes: list[int] = []
    process = Pipeline.process

    def spied(self: Pipeline, experiences: list[Experience], *args: Any, **more: Any) -> Any:
        sizes.append(len(experiences))
        return process(self, experiences, *args, **more)

    monkeypatch.setattr(Pipeline, "process", spied)
    assert isinstance(processed(store, refs, operators, 8, may_refer=True), PipelineDone)
    return sizes


@pytest.mark.parametrize("operator", BY_TASK, ids=lambda o: str(o["name"]))
def test_operators_by_task_see_a_part_at_a_time(operator: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(sizes_of_calls([operator], monkeypatch)) <= 16


@pytest.mark.parametrize("operator", WHOLE, ids=lambda o: str(o["name"]))
def test_other_operators_get_the_whole_batch(operator: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(sizes_of_calls([{"name": "reinforce"}, operator], monkeypatch)) == 1


class Tolerant:
    by_task = True
    needs = ("reward",)

    def process(self, experiences: list[Experience]) -> Operated:
        return experiences, GroupMetrics()


def test_runs_that_lack_what_an_operator_needs_are_dropped_though_a_whole_part_lacks_it() -> None:
    store, operators = Memory(), [{"name": f"{__name__}:Tolerant"}]
    groups = [[Experience(eid=EID(1, task, run, 0, f"s{task}-{run}"), tokens=[1, 2], prompt_length=1,
                          reward=None if task == 0 else 1.0) for run in range(4)] for task in range(3)]
    refs = put(store, *groups)
    parts = processed(store, refs, operators, 4)
    assert (parts.selected, parts) == (8, processed(store, refs, operators, None))


def test_a_batch_whose_tasks_are_not_in_order_is_processed_as_a_whole() -> None:
    store, refs = batch(1, 12, 0.0)
    assert processed(store, refs[::-1], [{"name": "grpo"}], 4) == processed(store, refs, [{"name": "grpo"}], None)
