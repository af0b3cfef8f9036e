"""events.values: ids, tasks and their encoding, status."""

from __future__ import annotations

import itertools
import math
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trinity_es.events import values
from trinity_es.events.errors import DataError, TaskNotSerializable
from trinity_es.events.values import BatchId, Task, task_to_dict

batch_ids = st.one_of(
    st.integers(0, 10**6),
    st.builds(lambda n, name: f"{n}/{name}", st.integers(0, 10**6), st.text(max_size=5)),
    st.text(max_size=8),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=3),
    max_leaves=8,
)
json_dicts = st.dictionaries(st.text("abé", max_size=3), json_values, max_size=3)


class Played:
    """A workflow as a user would write one: at the top of a module."""


# --- P1 -------------------------------------------------------------------------------------------------------------
def test_p1_the_smaller_number_goes_first_then_the_step_before_its_evals_and_names_last() -> None:
    given_ids: list[BatchId] = ["nightly", "12/gsm8k", "3/math", 12, 3, "3/gsm8k", "bench"]
    assert sorted(given_ids, key=values.sort_batch_id) == [3, "3/gsm8k", "3/math", 12, "12/gsm8k", "bench", "nightly"]
    assert sorted(["10/a", 9, "9/a", 10], key=values.sort_batch_id) == [9, "9/a", 10, "10/a"], "numbers, not texts"


@given(st.lists(batch_ids, max_size=12))
def test_p1_the_order_is_total_and_the_same_from_every_start(ids: list[BatchId]) -> None:
    ordered = sorted(ids, key=values.sort_batch_id)
    backwards = ids[::-1]
    assert sorted(backwards, key=values.sort_batch_id) == ordered
    for a, b in itertools.pairwise(ordered):
        assert values.sort_batch_id(a) <= values.sort_batch_id(b)
        if values.sort_batch_id(a) == values.sort_batch_id(b):
            assert a == b


@given(batch_ids, batch_ids)
@example(12, "12")
@example("12", "'12'")
@example("12", "12/gsm8k")
@example(-1, "-1")
def test_p1_different_batches_have_different_streams(a: BatchId, b: BatchId) -> None:
    if type(a) is not type(b) or a != b:
        assert values.batch_stream(a) != values.batch_stream(b)


# --- P2 -------------------------------------------------------------------------------------------------------------
@given(json_dicts, json_dicts, json_dicts, st.none() | st.integers(1, 64), st.booleans(), st.none() | json_dicts)
def test_p2_a_task_comes_back_from_its_json_as_it_was(
    workflow_args: dict[str, Any], rollout_args: dict[str, Any], index: dict[str, Any], repeat_times: int | None,
    is_eval: bool, raw_task: dict[str, Any] | None,
) -> None:
    task = Task(
        workflow="math_workflow", reward_fn="pkg.mod:Reward", repeat_times=repeat_times, workflow_args=workflow_args,
        rollout_args=rollout_args, index=index, is_eval=is_eval, raw_task=raw_task or None, batch_id=3, task_id=7,
    )
    written = orjson.loads(orjson.dumps(task_to_dict(task)))
    assert values.task_from_dict(written, batch_id=3, task_id=7) == task


def test_p2_ids_are_not_part_of_the_encoding_and_classes_travel_by_the_name_that_others_import() -> None:
    assert task_to_dict(Task(workflow="w", batch_id=3, task_id=7)) == {"workflow": "w"}
    written = task_to_dict(Task(workflow=Played, reward_fn=Played))
    assert written == {"workflow": f"{__name__}:Played", "reward_fn": f"{__name__}:Played"}


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (Task(workflow="w", workflow_args={"judge": {"by": lambda x: x}}), ["workflow_args.judge.by", "function"]),
        (Task(workflow="w", raw_task={"rows": [1, {"x": object()}]}), ["raw_task.rows[1].x", "object"]),
        (Task(workflow="w", reward_fn_args={"by": {1: "a"}}), ["reward_fn_args.by[1]", "key of type int"]),
        (Task(workflow="w", rollout_args={"temperature": math.nan}), ["rollout_args", "temperature", "nan"]),
        (Task(workflow="w", index={"at": [math.inf]}), ["index", "at[0]", "inf"]),
    ],
)
def test_p2_what_can_not_travel_is_named_with_its_path_and_type(task: Task, names: list[str]) -> None:
    with pytest.raises(TaskNotSerializable) as e:
        task_to_dict(task)
    for name in names:
        assert name in str(e.value)


def test_p2_a_local_class_and_one_of_the_main_script_are_refused() -> None:
    class Local:
        pass

    with pytest.raises(TaskNotSerializable, match=r"Local.*top of a module"):
        task_to_dict(Task(workflow=Local))
    with pytest.raises(TaskNotSerializable, match="__main__"):
        values.class_path(type("Mine", (), {"__module__": "__main__"}))


def test_p2_prompt_and_truth_are_found_by_the_format_args() -> None:
    task = Task(raw_task={"q": "1+1?", "a": "2"}, format_args={"prompt_key": "q", "response_key": "a"})
    assert (task.task_desc, task.truth) == ("1+1?", "2")
    assert (Task().task_desc, Task(raw_task={"prompt": "p"}).task_desc) == (None, "p")


# --- P4 -------------------------------------------------------------------------------------------------------------
def test_p4_a_status_is_ok_when_all_its_runs_completed_and_its_metric_is_the_first_runs() -> None:
    done = values.Status(completed_runs=2, total_runs=2, metrics=[{"a": 1.0}, {"a": 2.0}])
    assert (done.ok, done.metric) == (True, {"a": 1.0})
    assert not values.Status(completed_runs=3, total_runs=4).ok
    whole = values.Status(completed_runs=2, total_runs=2, metrics=[{"a": 1.5}], per_run=[{"a": 1.0}, {"a": 2.0}])
    assert whole.metric == {"a": 1.0}
    assert values.Status(completed_runs=0, total_runs=2).metric == {}


# --- P6 -------------------------------------------------------------------------------------------------------------
def test_p6_states_are_lower_case_strings_and_two_of_them_are_ends() -> None:
    assert [s.value for s in values.BatchLifecycleState] == ["pending", "running", "finalizing", "finalized", "aborted"]
    assert [s for s in values.BatchLifecycleState if s.ended] == ["finalized", "aborted"]


# --- finite ---------------------------------------------------------------------------------------------------------
@given(json_values)
def test_finite_json_is_accepted_whatever_its_shape(value: Any) -> None:
    values.require_finite(value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_path(bad: float) -> None:
    with pytest.raises(DataError, match=r"metrics\.score\[1\]") as e:
        values.require_finite({"score": [1.0, bad]}, "metrics")
    assert e.value.details == {"path": "metrics.score[1]"}
