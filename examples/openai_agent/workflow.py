"""Workflow that makes the agent in agent.py trainable. It connects the agent to the model and rewards its answer."""

from __future__ import annotations

import os

from examples.openai_agent.agent import answer
from trinity_es import Experience, Workflow

__all__ = ["Shelf"]


class Shelf(Workflow):
    """Workflow that asks the agent the row's question. The reward is 1 for the right answer, else 0."""

    def run(self) -> list[Experience]:
        endpoint = self.model.openai_endpoint()
        # A sync workflow plays one run at a time in its own process, so the environment belongs to this run.
        os.environ |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.token}
        said = answer(self.task.task_desc, self.task.raw_task["shelf"], endpoint.model)
        experiences = self.model.extract_experience_from_history()  # one, of all turns; a mask marks the model's tokens
        for experience in experiences:
            experience.reward = float(said == self.task.truth)
            experience.metrics = {"calls": sum(bool(m.get("tool_calls")) for m in experience.messages or [])}
        return experiences
