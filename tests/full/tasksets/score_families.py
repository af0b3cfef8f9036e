"""Makes tasks of families of reasoning-gym as a taskset does, and scores them. Arguments and answers are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from reasoning_gym.factory import DATASETS

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.errors import TrinityError
from trinity_es.events.values import Task, task_from_dict, task_to_dict
from trinity_es.tasksets.reasoning_gym import dataset
from trinity_es.tasksets.taskset import Taskset
from trinity_es.workflows.rewards import Reward

ROWS = 3


def scored(task: Task, response: str) -> float | str:
    """What a run of this task would get for a response, after the task has travelled to a runner."""
    there = task_from_dict(json.loads(json.dumps(task_to_dict(task))))
    try:
        return float(Reward(there)(response=response, prompt=there.task_desc, truth=there.truth))
    except Exception as e:  # a scorer's own
        return type(e).__name__


def made_score(made: Any, answer: str, entry: Any) -> float | str:
    try:
        return float(made.score_answer(answer, entry))
    except Exception as e:
        return type(e).__name__


def family(name: str) -> Any:
    """Its tasks, with pairs of scores: ours of a response, its own of the answer in it."""
    args = {"size": ROWS, "seed": 7}
    taskset = Taskset(TasksetConfig.model_validate({"name": "t", "path": f"reasoning_gym:{name}", "args": args}))
    made = dataset(name, args)
    told = []
    for row in range(ROWS):
        task, entry = taskset.task(row), made[row]
        right = entry["answer"] if isinstance(entry["answer"], str) else ""
        said = [right, right[:-1], f"{right} x", *(str(value) for value in entry["metadata"].values())]
        scores = [(scored(task, "no tags"), float(made.score_answer(None, entry)))]
        for answer in (text.strip() for text in said if "<" not in text and len(text) < 2000):
            scores.append((scored(task, f"so <answer>{answer}</answer>"), made_score(made, answer, entry)))
        told.append({"prompt": task.task_desc, "answer": task.truth, "scores": scores})
    return told


def main(names: list[str]) -> Any:
    out: dict[str, Any] = {}
    for name in names or sorted(set(DATASETS) - {"composite"}):
        try:
            out[name] = family(name)
        except (TrinityError, AssertionError) as e:
            out[name] = str(e)
    return out


told = main(json.loads(sys.argv[1])["families"])
sys.stdout.write("\n" + json.dumps(told) + "\n")  # a family writes dots there
