"""Workflow that makes the agent of agent.py trainable: it points the agent at the model and rewards its answer."""

from __future__ import annotations

import os

from examples.openai_agent.agent import answer
from trinity_es import Experience, Workflow

__all__ = ["Shelf"]


class Shelf(Workflow):
    """Ask the agent the row's question. The reward is 1 for the right answer, else 0."""

    def run(self) -> list[Experience]:
        endpoint = self.model.openai_endpoint()
        # A sync workflow plays one run at a time in a process of its own: the environment is this run's.
        os.environ |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.token}
        said = answer(self.task.task_desc, self.task.raw_task["shelf"], endpoint.model)
        experiences = self.model.extract_experience_from_history()  # one: all turns, with what the model said marked
        for experience in experiences:
            experience.reward = float(said == self.task.truth)
            experience.metrics = {"calls": sum(bool(m.get("tool_calls")) for m in experience.messages or [])}
        return experiences
