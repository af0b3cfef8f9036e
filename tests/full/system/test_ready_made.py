"""P57 on the real actor system: ready-made workflows by one line of a config, and graders that fail in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.systems import StartSystem, play_batch, scripted
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.vocabulary import AttemptFailed, BatchSubmitted
from trinity_es.tasksets.taskset import Taskset
from trinity_es.workflows.registry import WORKFLOWS

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "math_workflow": ({"question": "Clips?", "answer": "24 + 48\n#### 72"}, "<think>hm</think><answer>72.0</answer>"),
    "async_math_boxed_workflow": ({"question": "Half?", "answer": "$\\frac{1}{2}$"}, "It is \\boxed{0.5}."),
    "multiple_choice_workflow": ({"question": "Italy?", "choices": ["Bern", "Rome"], "answer": 1}, "Answer: B"),
    "async_code_workflow": ({"question": "Two.", "answer": ["assert two() == 2"]}, "```python\ntwo = lambda: 2\n```"),
}


SCRIPT = {"rules": [{"prompt": row["question"], "response": response} for row, response in ROWS.values()]}


def taskset(folder: Path, workflow: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = {"name": "rows", "path": "rows.jsonl", "workflow": workflow, "repeat_times": 2,
           "format": {"prompt_key": "question"}, "rollout_args": {"max_tokens": 200}, **settings}
    return {"batch_size": len(rows), "explorer_input": {"tasksets": [one]}}


def finalized(
    client: RolloutClient, batch: int, config: trinity_es.Config
) -> tuple[dict[str, Any], list[AttemptFailed], list[float]]:
    """Run the taskset as a batch: its result, its failed attempts, and the rewards that were delivered."""
    tasks = Taskset(config.buffer.explorer_input.tasksets[0]).all()
    result = play_batch(client, batch, tasks, timeout=240)
    failed = [r.event for r in client.log.events(batch) if isinstance(r.event, AttemptFailed)]
    return result, failed, [float(e.reward or 0.0) for e in client.experiences(batch)]


@pytest.mark.parametrize("workflow", ROWS)
def test_p57_a_ready_made_workflow_runs_by_its_name_and_its_log_names_its_class(
    workflow: str, system_for: StartSystem, new_id: Callable[[], int], tmp_path: Path
) -> None:
    if "math" in workflow:
        pytest.importorskip("math_verify")
    config = scripted(tmp_path, buffer=taskset(tmp_path, workflow, [ROWS[workflow][0]]))
    config.check()
    client, batch = system_for(explorer={"rollout_model": {"script": SCRIPT}}), new_id()
    result, failed, rewards = finalized(client, batch, config)
    assert failed == []
    assert rewards == pytest.approx([1.1 if workflow == "math_workflow" else 1.0] * 2)
    assert result["metrics"]["rollout/accuracy/mean"] == 1.0
    [task] = next(r.event.tasks or [] for r in client.log.events(batch) if isinstance(r.event, BatchSubmitted))
    assert task["workflow"] == WORKFLOWS.paths[workflow]
