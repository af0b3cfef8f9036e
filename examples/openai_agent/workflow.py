"""What makes the agent of `agent.py` trainable: it is pointed at the model, and its answer gets a reward.

A sync workflow plays one run at a time in a process of its own, so the environment is this run's.
"""

from __future__ import annotations

import os

from examples.openai_agent.agent import Agent
from trinity_es import Experience, Workflow

__all__ = ["Looks"]


class Looks(Workflow):
    """Run the agent on the card that the row's answer is."""

    def run(self) -> list[Experience]:
        endpoint = self.model.openai_endpoint()
        os.environ |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.token}
        agent = Agent(self.task.truth)
        parts = self.reward(agent.answer(self.task.task_desc))
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = sum(parts.values())
            experience.metrics = {**parts, "looks": agent.looks}
        return experiences
