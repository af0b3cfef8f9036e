"""Rewards and workflows for tests of the TRL adapter."""

from __future__ import annotations

from typing import Any

from trinity_es.events.experience import Experience
from trinity_es.workflows.workflow import Workflow


def vowels(response: str, truth: Any = None, prompt: Any = None) -> float:
    return sum(letter in "aeiou" for letter in response) / max(len(response), 1)


def is_truth(response: str, truth: Any = None, prompt: Any = None) -> float:
    """Return 1 if the reference answer belongs to the prompt. The response does not matter."""
    return float(prompt == f"{truth}=")


def broken(response: str, truth: Any = None, prompt: Any = None) -> float:
    raise RuntimeError("there is no reward")


class Flaky(Workflow):
    """Workflow that rewards a run by its number. Run 3 of the task with answer `workflow_args["of"]` always fails."""

    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        if self.task.truth == self.task.workflow_args["of"] and 3 in range(
            self.run_id_base, self.run_id_base + self.repeat_times
        ):
            raise RuntimeError("the sandbox is gone")
        experiences: list[Experience] = await self.model.chat_async(self.prompt_messages(), n=self.repeat_times)
        for i, experience in enumerate(experiences):
            experience.eid.run = self.run_id_base + i
            experience.reward = float(self.run_id_base + i)
        return experiences
