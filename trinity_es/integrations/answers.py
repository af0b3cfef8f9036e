"""A workflow without a reward: for trainers that reward answers themselves."""

from __future__ import annotations

from trinity_es.events.experience import Experience
from trinity_es.workflows.workflow import SingleTurnWorkflow

__all__ = ["AnswerWorkflow"]


class AnswerWorkflow(SingleTurnWorkflow):
    """One prompt, one answer a run, no reward. All runs of the task go to the engine as one request."""

    async def _rewarded(self, i: int, answer: Experience) -> bool:
        answer.eid.run = self.run_id_base + i
        return True
