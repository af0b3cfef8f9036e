"""The guide for those who come from Trinity-RFT: its example runs, its names exist (issue item 9)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import trinity_es
from tests.helpers.paths import ROOT
from tests.helpers.runs import explored
from trinity_es.actors.rollout.model import Model
from trinity_es.cli import app
from trinity_es.config.config import ConfigError, load_config

GUIDE = "".join((ROOT / "docs" / page).read_text() for page in ("FROM_TRINITY_RFT.md", "CARRIED_OVER.md"))
BLOCKS = dict(re.findall(r"```\w+ (\S+)\n(.*?)```", GUIDE, re.DOTALL))


def carried_over() -> str:
    """Their workflow file with our imports in place of theirs, and nothing else changed."""
    lines = BLOCKS["theirs/answers.py"].splitlines()
    kept = [line for line in lines if not line.startswith("from trinity.")]
    assert len(lines) - len(kept) == 3
    return BLOCKS["ours/imports"] + "\n".join(kept) + "\n"


def test_c8_their_config_is_answered_as_the_guide_says(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BLOCKS["theirs/run.yaml"])
    with pytest.raises(ConfigError) as e:
        load_config(tmp_path / "run.yaml")
    said = [p.replace(f"{tmp_path}/", "") for p in e.value.details["problems"]]
    shown = BLOCKS["theirs/answers.txt"].splitlines()
    assert len(shown) == 3
    assert set(shown) <= set(said)
    assert [line for line in said if "did you mean" in line or "nearest known key" in line] == []


def test_the_guide_s_example_runs_with_unchanged_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(BLOCKS["ours/run.yaml"])
    (tmp_path / "answers.py").write_text(carried_over())
    (tmp_path / "learner.py").write_text(BLOCKS["ours/learner.py"])
    rows = [json.dumps({"question": f"say {letter}", "answer": letter}) for letter in "abcdefgh"]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    config = load_config(tmp_path / "run.yaml", [
        "explorer.rollout_model.engine_type=scripted", "system.keeper=false",
    ])  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config.check()

    try:
        explored(trinity_es.Explorer(config))
    finally:
        for name in ("answers", "learner"):
            sys.modules.pop(name, None)
    with trinity_es.open_log(config.store.url) as log:
        steps = [log.replay(step) for step in range(1, 5)]
        check = log.replay("0/check")
        assert [row.trained_step for row in log.batches() if row.batch_type == "train"] == [1, 2, 3, 4]
        names = {row.batch_id for row in log.batches() if row.batch_type == "eval"}
    assert {"0/check", "2/check", "4/check"} <= names
    for step in steps:
        metrics = step.final_result["metrics"]
        assert metrics["rollout/finished_task_count"] == 4
        assert metrics["rollout/letters/sum"] == 4 * 4 * 8, "eight letters a run"
        assert {len(task.done) for task in step.tasks} == {4}
    metrics = check.final_result["metrics"]
    assert metrics["eval/check/length/mean@1"] == -4.0, "eight letters where four are wanted"
    assert 0 <= metrics["eval/check/right/mean@1"] <= 1
    assert metrics["eval/check/failed_task_count"] == 0


NAMES: dict[type[Any], str] = {
    trinity_es.Workflow: "reset set_repeat_times run run_async can_reset can_repeat is_async",
    trinity_es.MultiTurnWorkflow: "process_messages_to_experience process_messages_to_experience_async",
    trinity_es.RolloutCoordinator: "get_actor prepare shutdown submit_batch finalize_train_batch finalize_eval_batch "
                                   "abort_batch process_experiences",
    trinity_es.Explorer: "prepare explore shutdown",
    trinity_es.WorkflowRunner: "run_task",
    trinity_es.RolloutClient: "experiences batch",
    Model: "chat chat_async generate generate_async logprobs logprobs_async convert_messages_to_experience "
           "convert_messages_to_experience_async experience_from_messages model_version",
}  # fmt: skip


@pytest.mark.parametrize("cls", list(NAMES), ids=lambda cls: cls.__name__)
def test_every_name_that_the_guide_promises_is_there(cls: type[Any]) -> None:
    for name in NAMES[cls].split():
        assert hasattr(cls, name), name
        assert name in GUIDE or name.removesuffix("_async") in GUIDE, name


def test_every_command_that_the_guide_names_is_there() -> None:
    named = set(re.findall(r"trinity-es (?!is )([a-z]+)", GUIDE))
    there = set(get_command(app).commands)  # type: ignore[attr-defined]  # a group has them
    assert len(named) > 5
    assert named - there == set()
