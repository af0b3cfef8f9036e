"""A workflow without a reward: for trainers that reward answers themselves."""

from __future__ import annotations

from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.workflow import Workflow

__all__ = ["AnswerWorkflow"]


class AnswerWorkflow(Workflow):
    """One prompt, one answer a run, no reward. All runs of the task go to the engine as one request."""

    can_reset = True
    can_repeat = True
    is_async = True

    def reset(self, task: Task) -> None:
        """Take on another task."""
        self.task = task

    async def run_async(self) -> list[Experience]:
        """Return an experience a run."""
        experiences: list[Experience] = await self.model.chat_async(self.prompt_messages(), n=self.repeat_times)
        for i, experience in enumerate(experiences):
            experience.eid.run = self.run_id_base + i
        return experiences
