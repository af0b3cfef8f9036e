"""Rewards and workflows that tests of the TRL adapter name."""

from __future__ import annotations

from typing import Any

from trinity_es.events.experience import Experience
from trinity_es.workflows.workflow import Workflow


def vowels(response: str, truth: Any = None, prompt: Any = None) -> float:
    return sum(letter in "aeiou" for letter in response) / max(len(response), 1)


def is_truth(response: str, truth: Any = None, prompt: Any = None) -> float:
    """Reward 1 if the reference answer belongs to the prompt, whatever the response is."""
    return float(prompt == f"{truth}=")


def broken(response: str, truth: Any = None, prompt: Any = None) -> float:
    raise RuntimeError("there is no reward")


class Flaky(Workflow):
    """Rewards a run by its number; run 3 of the task whose answer is `workflow_args["of"]` never ends well."""

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
