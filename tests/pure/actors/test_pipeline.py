"""actors.pipeline: operators, their metrics, and what a wrong one says."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from tests.helpers.pipelines import Ticks, experience, group, run
from trinity_es.actors.coordinator.delivery.advantages import Operated
from trinity_es.actors.coordinator.delivery.operator_models import OperatorModels
from trinity_es.actors.coordinator.delivery.operators import (
    OPERATORS,
    ExperienceOperator,
    ExperienceOperatorV1,
    RewardFilter,
)
from trinity_es.actors.coordinator.delivery.pipeline import Pipeline, PipelineResult, StalenessLimit
from trinity_es.actors.plugin_lookup import label_of
from trinity_es.events.errors import ConfigError, EngineError, PipelineError
from trinity_es.events.experience import EID, Experience

NOT_CLASSES = {"a": 1}


class Recorder:
    """Calls a function as an operator; named in configs as "tests...:Recorder"."""

    def __init__(self, does: Any = None) -> None:
        self.does = does

    def process(self, experiences: list[Experience]) -> Operated:
        return self.does(experiences) if self.does else (experiences, {})


class Asking(ExperienceOperatorV1):
    """Asks its auxiliary model; tells what was done with it."""

    def __init__(self, told: list[str], fails: list[str] | None = None) -> None:
        self.told, self.fails = told, fails or []

    def tell(self, what: str) -> None:
        self.told.append(what)
        if what in self.fails:
            self.fails.remove(what)
            raise ValueError(f"{what} failed")

    async def prepare(self) -> None:
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        self.tell(f"prepare {sorted(self.auxiliary_models)}")

    async def process(self, exps: list[Experience]) -> Operated:
        assert asyncio.get_running_loop() is self.loop
        answers = [await model() for model in self.auxiliary_models.get("judge", [])]
        self.tell(f"process {answers}")
        return exps, {"asked": float(len(answers))}

    async def close(self) -> None:
        self.tell("close")


class PlainWithAll(ExperienceOperator):
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def prepare(self) -> None:
        self.told.append("prepare")

    def process(self, exps: list[Experience]) -> Operated:
        return exps, {}

    def close(self) -> None:
        self.told.append("close")


class NoOperator:
    pass


def run_own(does: Any, experiences: list[Experience] | None = None) -> PipelineResult:
    return run([{"name": f"{__name__}:Recorder", "args": {"does": does}}], experiences or group(0.0, 1.0))


# --- the pipeline ---------------------------------------------------------------------------------------------------
def test_p29_no_experiences_give_no_metrics() -> None:
    assert run([{"name": "grpo"}], []) == PipelineResult([], {})


def test_p29_a_pipeline_without_operators_counts_what_goes_through() -> None:
    given_experiences = group(1.0, 2.0)
    result = run([], given_experiences)
    assert result.experiences == given_experiences
    assert result.metrics == {
        "experience_pipeline/time/total": 1.0,
        "experience_pipeline/experience_count": 2.0,
        "experience_pipeline/dropped_count": 0.0,
    }


def test_p29_operators_run_in_order_each_timed_all_metrics_prefixed() -> None:
    result = run([{"name": "reward_filter", "args": {"threshold": 0.5}}, {"name": "grpo"}], group(0.0, 1.0, 2.0))
    assert [e.reward for e in result.experiences] == [1.0, 2.0]
    assert result.dropped == 1
    metrics = {k.removeprefix("experience_pipeline/"): v for k, v in result.metrics.items()}
    assert all(k.startswith("experience_pipeline/") for k in result.metrics)
    assert all(type(v) is float for v in result.metrics.values())
    assert metrics == {
        "filtered_count": 1.0, "grpo/filtered_count": 0.0, "group_advantages/reward_mean/mean": 1.5,
        "group_advantages/reward_mean/max": 1.5, "group_advantages/reward_mean/min": 1.5,
        "group_advantages/reward_std/mean": math.sqrt(0.5), "group_advantages/reward_std/max": math.sqrt(0.5),
        "group_advantages/reward_std/min": math.sqrt(0.5), "reward_filter/time": 1.0, "grpo/time": 1.0,
        "time/total": 5.0, "experience_count": 2.0, "dropped_count": 1.0, "reward_filter/dropped_count": 1.0,
    }  # fmt: skip
    assert result.dropped_by == {"reward_filter": ["1/0/0/0/s0-0"]}


def test_p51_operators_are_coroutines_with_auxiliary_models_prepared_once_and_closed() -> None:
    told: list[str] = []
    plain: list[str] = []

    async def one() -> int:
        return 1

    async def two() -> int:
        return 2

    models: dict[str, list[Any]] = {"judge": [one]}
    operators = [{"name": f"{__name__}:Asking", "args": {"told": told}},
                 {"name": f"{__name__}:PlainWithAll", "args": {"told": plain}}]
    pipeline = Pipeline(operators, lambda: models)
    assert not pipeline.has_open_operators
    assert pipeline.run(group(0.0, 1.0), Ticks()).metrics["experience_pipeline/asked"] == 1
    models = {"judge": [one, two]}  # an engine came
    assert pipeline.run(group(0.0, 1.0), Ticks()).metrics["experience_pipeline/asked"] == 2
    assert pipeline.has_open_operators
    assert pipeline.close() == []
    assert told == ["prepare ['judge']", "process [1]", "process [1, 2]", "close"]
    assert plain == ["prepare", "close"]
    assert pipeline.close() == []


def test_p51_an_operator_that_can_not_prepare_fails_the_batch_and_is_prepared_again() -> None:
    told: list[str] = []
    args = {"told": told, "fails": ["prepare []", "close"]}
    pipeline = Pipeline([{"name": f"{__name__}:Asking", "args": args}])
    with pytest.raises(PipelineError, match=r"operator Asking .* ValueError: prepare \[\] failed"):
        pipeline.run(group(0.0, 1.0), Ticks())
    assert not pipeline.has_open_operators
    assert pipeline.run(group(0.0, 1.0), Ticks()).dropped == 0
    assert pipeline.close() == ["operator Asking could not be closed: ValueError: close failed"]


def test_p51_models_of_operators_come_and_go_and_are_waited_for() -> None:
    models = OperatorModels(["judge"], "t", patience=0.05, make_client=lambda endpoint: endpoint.base_url)
    with pytest.raises(EngineError, match=r"no engine of auxiliary model judge, .* was ready within 0.05 s"):
        models.clients()
    models.update({"judge": {"judge-1": "http://b", "judge-0": "http://a"}, "other": {"x": "y"}})
    assert models.clients() == {"judge": ["http://a/v1", "http://b/v1"]}
    models.update({"judge": {"judge-1": "http://c"}})
    assert models.clients() == {"judge": ["http://c/v1"]}
    assert OperatorModels([], "t").clients() == {}


def test_p29_two_operators_of_one_name_are_told_apart() -> None:
    twice = [{"name": "reward_filter", "args": {"threshold": t}} for t in (0.5, 1.5)]
    metrics = run(twice, group(0.0, 1.0, 2.0, 3.0)).metrics
    assert metrics["experience_pipeline/filtered_count"] == 1.0
    assert metrics["experience_pipeline/reward_filter_2/filtered_count"] == 1.0
    assert {"experience_pipeline/reward_filter/time", "experience_pipeline/reward_filter_2/time"} <= metrics.keys()


def test_a_label_is_taken_once_also_by_a_class_that_is_named_like_a_second_one() -> None:
    names = ["jsonl", "mod:jsonl_2", "jsonl", "jsonl", "mod:jsonl_2"]
    taken: list[str] = []
    for name in names:
        taken.append(label_of(name, taken))
    assert taken == ["jsonl", "jsonl_2", "jsonl_3", "jsonl_4", "jsonl_2_2"]


def test_p29_replaced_experiences_are_counted_by_who_they_are() -> None:
    assert run_own(lambda experiences: ([*experiences[1:], experience(9, 9, 0.0)], {})).dropped == 1


def test_p29_an_operator_of_ones_own_is_given_as_module_and_class() -> None:
    result = run_own(lambda experiences: (experiences[:1], {"mine": np.int64(3)}))
    assert len(result.experiences) == 1
    assert result.metrics["experience_pipeline/mine"] == 3.0
    assert "experience_pipeline/Recorder/time" in result.metrics


def test_p29_an_operator_can_be_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "mine", lambda: RewardFilter(1.5))
    assert run([{"name": "mine"}], group(1.0, 2.0)).dropped == 1


# --- the age of tokens ----------------------------------------------------------------------------------------------
def made_by(run: int, *versions: int, **info: Any) -> Experience:
    """Return an experience whose tokens the weights `versions` made, a token each."""
    spans = [[version, at, at + 1] for at, version in enumerate(versions)]
    return experience(0, run, float(run), info={"model_version": versions[-1], "version_spans": spans} | info)


def test_an_answer_whose_oldest_token_is_too_old_is_dropped_before_the_operators_and_named() -> None:
    batch = [made_by(0, 6, 9), made_by(1, 7, 9), made_by(2, 9, 9), made_by(3, 9, 6)]
    result = run([{"name": "grpo"}], batch, StalenessLimit(2, 9, {}))
    assert result.dropped_by == {"max_staleness": ["1/0/0/0/s0-0", "1/0/3/0/s0-3"]}
    assert (result.dropped, [e.eid.run for e in result.experiences]) == (2, [1, 2])
    assert result.metrics["experience_pipeline/max_staleness/dropped_count"] == 2.0
    assert result.metrics["experience_pipeline/dropped_count"] == 2.0
    assert result.metrics["experience_pipeline/group_advantages/reward_mean/mean"] == 1.5  # of those that stay


def test_without_a_limit_an_answer_of_any_age_is_delivered() -> None:
    result = run([], [made_by(0, 0, 9)])
    assert (result.dropped, result.dropped_by) == (0, {})
    assert "experience_pipeline/max_staleness/dropped_count" not in result.metrics


def test_versions_of_the_adapter_that_answered_count_as_those_of_the_weights() -> None:
    old, new = ["math", 3, 0, 2], ["math", 6, 0, 2]
    removed, unknown = ["code", 5, 0, 2], ["other", 0, 0, 2]
    batch = [made_by(run, 9, 9, adapter_spans=[spans]) for run, spans in enumerate((old, new, removed, unknown))]
    result = run([], batch, StalenessLimit(2, 9, {"math": 6, "code": 5}))
    assert result.dropped_by == {"max_staleness": ["1/0/0/0/s0-0"]}
    stale = made_by(0, 6, 6, adapter_spans=[new])  # the weights below the adapter are too old
    assert run([], [stale], StalenessLimit(2, 9, {"math": 6})).dropped == 1


@pytest.mark.parametrize("info", [
    {}, {"model_version": None}, {"model_version": "old"}, {"version_spans": "none", "adapter_spans": [["math", 1]]},
])
def test_an_answer_that_names_no_versions_is_not_dropped_for_its_age(info: dict[str, Any]) -> None:
    assert run([], [experience(0, 0, 1.0, info=info)], StalenessLimit(0, 9, {"math": 9})).dropped == 0


def test_a_batch_that_is_too_old_as_a_whole_delivers_nothing() -> None:
    operators = [{"name": name} for name in ("reward_filter", "zero_variance_filter", "grpo", "dedup")]
    result = run(operators, [made_by(0, 1, 1), made_by(1, 1, 1)], StalenessLimit(0, 2, {}))
    assert (result.experiences, result.dropped, list(result.dropped_by)) == ([], 2, ["max_staleness"])


# --- what a wrong one says ------------------------------------------------------------------------------------------
def test_p29_an_operator_that_raises_is_named_with_its_cause() -> None:
    def fail(experiences: list[Experience]) -> Operated:
        raise KeyError("no such key")

    with pytest.raises(PipelineError, match=r"operator Recorder .*KeyError: 'no such key'") as e:
        run_own(fail)
    assert e.value.details == {"operator": "Recorder", "cause": "KeyError"}
    assert isinstance(e.value.__cause__, KeyError)


def spoil(name: str, value: Any, which: slice = slice(1, 2)) -> Any:
    def does(experiences: list[Experience]) -> Operated:
        for e in experiences[which]:
            setattr(e, name, value)
        return experiences, {}

    return does


@pytest.mark.parametrize(("name", "value"), [
    ("reward", math.nan), ("reward", 1.7e308), ("advantages", np.array([0.0, math.nan], np.float32)),
    ("returns", [math.inf, 0.0]), ("advantages", [1e300, 0.0]), ("teacher_logprobs", [0.0, -math.inf]),
])
def test_a_run_whose_numbers_an_operator_spoils_is_dropped_and_named_not_the_batch(name: str, value: Any) -> None:
    result = run_own(spoil(name, value), [*group(0.0, 1.0, 2.0), experience(1, 0, 1.0)])
    assert [e.eid.uid for e in result.experiences] == ["1/0/0/0/s0-0", "1/0/2/0/s0-2", "1/1/0/0/s1-0"]
    assert result.dropped_by == {"Recorder": ["1/0/1/0/s0-1"]}


def test_a_run_that_came_with_numbers_that_are_none_is_dropped_and_named_not_the_batch() -> None:
    batch = [*group(0.0, 1.0, 2.0), *group(1.0, 3.0, task=1)]
    batch[1].logprobs = np.array([0.0, math.nan], np.float32)  # as a payload of an older release may hold them
    batch[3].reward = 1.7e308
    result = run([{"name": "grpo"}], batch)
    assert result.dropped_by == {"unusable": ["1/0/1/0/s0-1", "1/1/0/0/s1-0"]}
    assert len(result.experiences) == 3
    assert all(np.isfinite(e.advantages).all() for e in result.experiences if e.advantages is not None)


def test_all_experiences_of_a_run_go_with_the_one_that_is_no_good() -> None:
    batch = [experience(0, 0, 1.0), experience(0, 0, 1.0), experience(0, 1, 0.0)]
    batch[1].eid = EID(1, 0, 0, 1, "step")
    batch[1].logprobs = np.array([0.0, math.inf], np.float32)
    result = run([], batch)
    assert result.dropped_by == {"unusable": ["1/0/0/0/s0-0", "1/0/0/1/step"]}
    assert result.dropped == 2


@pytest.mark.parametrize("name", ["grpo", "reward_filter", "reward_std_filter", "pass_rate_calculator"])
def test_a_run_without_a_reward_is_dropped_and_named_where_others_have_one(name: str) -> None:
    result = run([{"name": name}], [*group(0.0, 1.0), experience(0, 2, None)])
    assert result.dropped_by == {name: ["1/0/2/0/s0-2"]}
    with pytest.raises(PipelineError, match=f"{name} .*has no reward"):
        run([{"name": name}], [experience(0, 0, None), experience(0, 1, None)])


@pytest.mark.parametrize("name", [
    "grpo", "reinforce", "opmd", "asymre", "rec", "step_wise_grpo", "pass_rate_calculator", "reward_std_filter",
])
def test_the_largest_reward_that_is_taken_gives_finite_advantages(name: str) -> None:
    batch = [*group(1e30, -1e30, 0.0), *group(0.0, 1.0, task=1)]
    result = run([{"name": name}], batch)
    assert (len(result.experiences), result.dropped_by) == (5, {})


@pytest.mark.parametrize("value", [1e308, "much", None])
def test_a_reward_that_can_not_be_shaped_takes_its_run_out(value: Any) -> None:
    shaping = {"stats_key": "quality", "op_type": "MUL", "weight": 1e10}
    batch = [experience(0, 0, 2.0, info={"quality": value}), experience(0, 1, 2.0, info={"quality": 1e-10})]
    result = run([{"name": "reward_shaping", "args": {"reward_shaping_configs": [shaping]}}, {"name": "grpo"}], batch)
    assert result.dropped_by == {"reward_shaping": ["1/0/0/0/s0-0"]}
    assert [e.reward for e in result.experiences] == [2.0]


@pytest.mark.parametrize(("does", "says"), [
    (lambda e: e, "returned a list, expected"),
    (lambda e: None, "returned a NoneType"),
    (lambda e: (e, {}, 3), "returned a tuple"),
    (lambda e: (tuple(e), {}), r"returned \(tuple, dict\)"),
    (lambda e: (e, []), r"returned \(list, list\)"),
    (lambda e: ([1], {}), "returned a int among its experiences"),
    (lambda e: (e, {"a": "x"}), "metric a of type str"),
    (lambda e: (e, {1: 2}), "metric named 1"),
    (lambda e: (e, {"a": math.nan}), "metric a = nan"),
    (spoil("reward", math.nan, slice(None)), "1/0/0/0/s0-0: reward is nan"),
    (spoil("returns", [math.inf, 0.0], slice(None)), r"1/0/0/0/s0-0: returns\[0\] is inf"),
    (spoil("advantages", [0.0]), "1/0/1/0/s0-1: advantages has shape"),
    (spoil("eid", None), "eid is a NoneType"),
])
def test_p29_what_an_operator_returns_is_checked_and_the_operator_named(does: Any, says: str) -> None:
    with pytest.raises(PipelineError, match=f"operator Recorder .*{says}") as e:
        run_own(does)
    assert e.value.details["operator"] == "Recorder"


def test_p29_lists_that_an_operator_assigns_become_arrays() -> None:
    second = run_own(spoil("advantages", [0.5, 1])).experiences[1]
    assert (second.advantages.dtype, second.advantages.tolist()) == (np.float32, [0.5, 1.0])


@pytest.mark.parametrize(("entry", "says"), [
    ({"name": "grop"}, r"no operator 'grop'; known: .*grpo, .*reward_filter, .*\"module:Class\""),
    ({"name": "no_such_module:A"}, "no_such_module:A.*No module named.*PYTHONPATH"),
    ({"name": f"{__name__}:Missing"}, "Missing.*has no Missing"),
    ({"name": f"{__name__}:NOT_CLASSES"}, "is a dict, not a class"),
    ({"name": f"{__name__}:NoOperator"}, "no method process"),
    ({"name": "grpo", "args": {"epsilonn": 1}}, "grpo can't be built with {'epsilonn': 1}"),
    ({"name": "grpo", "args": {"epsilon": 0}}, "epsilon is 0"),
    ({"name": "grpo", "args": {"std_cal_level": "all"}}, "std_cal_level is 'all'"),
    ({"name": "grpo", "arg": {}}, "an entry of operators must be {name, args}"),
    ({"name": "dedup", "args": {"scope": "all"}}, "scope is 'all'"),
    ({"name": "data_juicer"}, "data_juicer is not built in: .* name it \"module:Class\""),
    ({"args": {}}, "an entry of operators must be {name, args}"),
    ({"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": [{"op_type": "ADD"}]}}, "stats_key"),
])
def test_p29_a_config_that_can_not_work_is_refused_before_the_first_batch(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Pipeline([entry])
