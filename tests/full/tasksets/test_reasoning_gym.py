"""Tasksets of reasoning-gym: the real package; its tasks, its scores, the same on every machine."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.client_packages import ask
from tests.helpers.of_the_day import EXAMPLES, by_turns
from tests.helpers.reasoning_gym import play_example, rewards
from tests.helpers.runs import finish
from tests.helpers.taskset_reader import TasksetReader
from trinity_es.events import vocabulary as ev

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
TWO = {"name": "two", "path": "reasoning_gym:composite", "args": {"size": 40, "seed": 3, "datasets": [
    {"name": "leg_counting", "weight": 2, "config": {"max_animals": 4}}, {"name": "spell_backward"},
]}}

Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def opened(reasoning_gym: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    reader = TasksetReader(HERE / "open_taskset.py", reasoning_gym, tmp_path_factory.mktemp("reader") / "stderr")
    yield reader.open
    reader.close()


def test_a_composite_is_one_taskset_with_tasks_of_its_families(opened: Opened) -> None:
    told = opened(**TWO)
    assert told["source"] == {
        "taskset": "two", "is_eval": False, "path": "reasoning_gym:composite", "subset": None, "split": None,
        "asked": None, "revision": "0.1.25", "args": json.dumps(TWO["args"], sort_keys=True, separators=(",", ":")),
        "rows": 40, "order": "",
    }
    families = [ast.literal_eval(task["raw_task"]["entry"])["metadata"]["source_dataset"] for task in told["tasks"]]
    assert set(families) == {"leg_counting", "spell_backward"}
    assert families.count("leg_counting") > families.count("spell_backward")
    assert {task["reward_fn"] for task in told["tasks"]} == {"trinity_es.tasksets.reasoning_gym:Score"}
    assert "<answer>answer here</answer>" in told["tasks"][0]["format_args"]["system_prompt"]
    other = opened(**{**TWO, "args": {**TWO["args"], "seed": 1000}})
    assert [task["raw_task"]["prompt"] for task in other["tasks"]] != [task["raw_task"]["prompt"]
                                                                       for task in told["tasks"]]


def test_another_version_or_other_args_than_those_of_the_log_are_refused(opened: Opened) -> None:
    source = opened(**TWO)["source"]
    assert opened(recorded=source, **TWO)["source"] == source
    older = opened(recorded=source | {"revision": "0.1.24"}, **TWO)["error"]
    assert "`pip install reasoning-gym==0.1.24`" in older
    changed = opened(recorded=source, **{**TWO, "args": {"size": 40, "seed": 4}})["error"]
    assert "its args is" in changed


def test_what_reasoning_gym_has_not_is_refused_by_name(opened: Opened) -> None:
    unknown = opened(name="t", path="reasoning_gym:leg_count")["error"]
    assert "no family 'leg_count': leg_counting" in unknown
    wrong = opened(name="t", path="reasoning_gym:leg_counting", args={"animals": 3})["error"]
    assert "reasoning_gym:leg_counting has no parameter 'animals'" in wrong
    small = opened(name="t", path="reasoning_gym:leg_counting", args={"min_animals": 0})["error"]
    assert "reasoning_gym:leg_counting refuses seed = 0, min_animals = 0: min_animals must be positive" in small


@pytest.mark.parametrize(("part", "said"), [
    ({"name": "leg_countin"}, "no family 'leg_countin': leg_counting"),
    ({"name": "leg_counting", "config": {"max_animal": 3}},
     "reasoning_gym:leg_counting has no parameter 'max_animal': its parameters are "),
    ({"name": "leg_counting", "config": {"max_animals": -3}}, "reasoning_gym:leg_counting refuses max_animals = -3: "),
    ({"name": "leg_counting", "wight": 3}, "no parameter 'wight': its parameters are name, weight, config; did you"),
    ("leg_counting", "composite is 'leg_counting': give {name: FAMILY}"),
    ({"name": ["leg_counting"]}, "composite is {'name': ['leg_counting']}: give"),
])
def test_what_a_family_of_a_composite_has_not_is_refused_by_its_name(opened: Opened, part: Any, said: str) -> None:
    parts = [{"name": "spell_backward"}, part]
    assert said in opened(name="t", path="reasoning_gym:composite", args={"datasets": parts})["error"]
    alone = opened(name="t", path="reasoning_gym:composite", args={"datasets": 5})["error"]
    assert "a dataset of reasoning_gym:composite is 5: give" in alone


BY_CHANCE = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Families whose tasks depend on the order of a set, which differs between processes."""


@pytest.mark.all
def test_every_family_makes_its_tasks_and_is_scored_as_it_scores_itself(reasoning_gym: dict[str, str]) -> None:
    told = ask(HERE / "score_families.py", {**reasoning_gym, "PYTHONHASHSEED": "1"}, families=[])
    again = ask(HERE / "score_families.py", {**reasoning_gym, "PYTHONHASHSEED": "2"}, families=[])
    assert len(told) == 105
    assert {name: rows for name, rows in told.items() if isinstance(rows, str)} == {}
    assert {name for name in told if told[name] != again[name]} <= BY_CHANCE
    scores = [(name, *pair) for name, rows in told.items() for row in rows for pair in row["scores"]]
    assert [score for score in scores if score[1] != score[2]] == []
    assert sum(ours == 1 for _, ours, _ in scores) > 300


@by_turns(EXAMPLES[2], EXAMPLES)
def test_j2_the_example_plays_both_and_its_log_needs_no_package(reasoning_gym: dict[str, str], tmp_path: Path) -> None:
    """With an engine that says "2" to everything, which is right for some tasks of both."""
    store = f"sqlite:///{tmp_path / 'log.sqlite'}"
    changes: dict[str, object] = {
        "explorer.rollout_model.engine_type": "scripted", "explorer.rollout_model.engine_args": "{}",
        "explorer.rollout_model.script": "{response: '2'}", "trainer.class": "null", "total_steps": "2",
        "model.model_path": "''",
        "explorer.eval_interval": "2", "store.url": store, "run_dir": tmp_path, "checkpoint_root_dir": tmp_path,
    }
    play_example(changes, reasoning_gym, tmp_path, timeout=240)
    with trinity_es.open_log(store) as log:
        batches = [batch.batch_id for batch in log.batches()]
        scored = [(task.truth, reward) for batch in batches for task, reward in rewards(log, batch)]
        sources = [r.event.source for r in log.read(stream="tasksets") if isinstance(r.event, ev.TasksetResolved)]
    assert set(batches) == {"0/letters", "0/bits", 1, 2, "2/letters", "2/bits"}
    assert all(reward == (1.0 if truth == "2" else 0.0) for truth, reward in scored)
    assert {"1", "2"} <= {truth for truth, _ in scored}
    assert {(s.taskset, s.is_eval, s.revision) for s in sources} == {
        (name, is_eval, "0.1.25") for name in ("letters", "bits") for is_eval in (False, True)}
    code, _, err = finish("verify", "--log", store, cwd=tmp_path)
    assert code == 0, err
    for batch in batches:
        code, out, err = finish("replay", batch, "--json", "--log", store, cwd=tmp_path)
        assert json.loads(out)["result_equal"] is True, err
