"""The pages "Write a ...": their files are written and their commands run, in order, as a reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trinity_es
from tests.helpers.paths import ROOT


class Reader:
    """Follows a page in a folder of his own."""

    def __init__(self, page: str, folder: Path) -> None:
        self.text, self.folder = (ROOT / "docs" / page).read_text(), folder
        self.said: list[str] = []
        """What each command printed."""

    def follow(self) -> None:
        for name, body in re.findall(r"^```\w+(?: (\S+))?\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE):
            if name:
                (self.folder / name).write_text(body)
            else:
                self.said += [self._run(line) for line in body.splitlines()]

    def _run(self, line: str) -> str:
        command = shlex.split(line)
        start = {"trinity-es": [sys.executable, "-m", "trinity_es"], "python": [sys.executable]}
        done = subprocess.run(
            [*start.get(command[0], command[:1]), *command[1:]], cwd=self.folder, capture_output=True, text=True,
            timeout=120, check=False, env=os.environ | {"NO_COLOR": "1", "COLUMNS": "120"},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def metrics(folder: Path, name: str, batch: trinity_es.events.values.BatchId = 1) -> dict[str, float]:
    with trinity_es.open_log(f"sqlite:///{folder}/runs/trinity/{name}/log.sqlite") as log:
        result = log.replay(batch).final_result
    found: dict[str, float] = result["metrics"]
    return found


def test_the_page_on_workflows_runs(tmp_path: Path) -> None:
    reader = Reader("WRITE_A_WORKFLOW.md", tmp_path)
    reader.follow()
    right, wrong, _, shown, sync, turns = reader.said
    assert "reward 2," in right
    assert "reward 0," in wrong
    assert shown.startswith("batch 1  train  finalized\n")
    assert "reward 1," in sync
    assert "tries = 3" in turns
    assert re.fullmatch(r"5 at \d{10}", (tmp_path / "posted.txt").read_text())
    assert "posted = 15" in sync
    found = metrics(tmp_path, "sums")
    assert (found["rollout/right/mean"], found["rollout/letters/sum"], found["rollout/reward/mean"]) == (0.5, 8.0, 1.0)


def test_the_page_on_rewards_runs(tmp_path: Path) -> None:
    reader = Reader("WRITE_A_REWARD.md", tmp_path)
    reader.follow()
    short, check, _, _, polite = reader.said
    assert "reward 0.8," in short
    assert "length = -0.2" in short
    assert "reward 0," in check
    assert "thanks = 0" in polite
    found = metrics(tmp_path, "cities")
    assert {"rollout/right/mean", "rollout/length/mean", "rollout/reward/mean"} <= found.keys()
    assert found["rollout/right/mean"] == 0.5
    assert metrics(tmp_path, "cities", "0/check")["eval/check/reward/mean@1"] == 0.5


def test_the_page_on_trainers_runs(tmp_path: Path) -> None:
    reader = Reader("WRITE_A_TRAINER.md", tmp_path)
    reader.follow()
    assert reader.said[-2] == "seen 8\n"
    assert re.fullmatch(r"(step (\d) batch \2 \[[\d.]+\] \(1, \d+\) \[ *0 +\d+\]\n){2}", reader.said[-1])
    [newest] = tmp_path.glob("checkpoints/trinity/letters/global_step_3/state.json")
    assert json.loads(newest.read_text()) == {"seen": 12}
    with trinity_es.open_log(f"sqlite:///{tmp_path}/runs/trinity/letters/log.sqlite") as log:
        assert [b.trained_step for b in log.batches() if b.batch_type == "train"] == [1, 2, 3]


@pytest.mark.parametrize("page", ["WRITE_A_WORKFLOW.md", "WRITE_A_REWARD.md", "WRITE_A_TRAINER.md"])
def test_the_pages_are_short_and_found(page: str) -> None:
    assert len((ROOT / "docs" / page).read_text().splitlines()) < 130
    assert f"docs/{page}" in (ROOT / "README.md").read_text()
