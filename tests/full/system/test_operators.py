"""P51: operators of Trinity-RFT 0.6 in the pipeline of a running system, one of them a coroutine that asks a judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.systems import StartSystem, play_batch
from trinity_es import ExperienceOperatorV1, Task
from trinity_es.events.experience import Experience
from trinity_es.testing import SleepWorkflow, wait_until


class Judging(ExperienceOperatorV1):
    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    def note(self, what: str) -> None:
        with self.notes.open("a") as f:
            f.write(what + "\n")

    async def prepare(self) -> None:
        self.note("prepared")

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        judges = self.auxiliary_models["judge"]
        for i, experience in enumerate(exps):
            judge = judges[i % len(judges)]
            said = await judge.chat.completions.create(
                model=judge.model_path, messages=[{"role": "user", "content": experience.response_text or ""}]
            )
            experience.reward = float(said.choices[0].message.content) + experience.eid.run
        return exps, {"judged": len(exps), "judges": len(judges)}

    async def close(self) -> None:
        self.note("closed")


def test_p51_a_judge_is_asked_by_a_coroutine_of_the_pipeline(start_system: StartSystem, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    judge = {"name": "judge", "engine_type": "scripted", "engine_num": 2, "script": {"response": "0.5"}}
    client = start_system(
        explorer={"auxiliary_models": [judge]},
        buffer={"pipeline": {"operators": [
            {"name": f"{__name__}:Judging", "args": {"notes": str(notes)}},
            {"name": "mask_response_truncated"}, {"name": "pass_rate_calculator"},
            {"name": "dapo_dynamic_sampling", "args": {"correct_threshold": 1.0}}, {"name": "opmd"},
        ]}},
    )
    for batch in (1, 2):
        tasks = [Task(workflow=SleepWorkflow, repeat_times=n) for n in (2, 1)]
        metrics = play_batch(client, batch, tasks)["metrics"]
        told = {name.removeprefix("experience_pipeline/"): value for name, value in metrics.items()}
        assert (told["judged"], told["judges"]) == (3, 2)
        assert told["selection/valid_ratio"] == 0.5  # pass rates 1.0 and 0.5
        assert told["group_advantages/group_baseline/mean"] == 1.0
        experiences = list(client.experiences(batch))
        assert [(e.eid.task, e.eid.run, e.reward) for e in experiences] == [(0, 0, 0.5), (0, 1, 1.5)]
        scores = [float(e.advantages.max() + e.advantages.min()) for e in experiences if e.advantages is not None]
        assert np.sign(scores).tolist() == [-1.0, 1.0]
    assert notes.read_text() == "prepared\n"
    client.shutdown()
    wait_until(lambda: notes.read_text() == "prepared\nclosed\n", "the operator to be closed", 10)
