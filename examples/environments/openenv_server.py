"""An OpenEnv server for a tiny model: it asks two letters, and the right answer repeats the letter sixteen times.

It runs in its own Python, since OpenEnv and the engines need different packages:

    uv venv runs/openenv && uv pip install --python runs/openenv openenv==0.10.0
    runs/openenv/bin/python examples/environments/openenv_server.py 8000
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LETTERS, LENGTH, TURNS = "abcdefgh", 16, 2
SESSIONS = 256
"""Maximum number of episodes at a time."""


class Answer(Action):
    answer: str


class Question(Observation):
    question: str


class Letters(Environment[Answer, Question, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.turn = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Question:
        self.letters, self.turn = "".join(random.Random(seed).choices(LETTERS, k=TURNS)), 0
        return Question(question=f"{self.letters[0]}=")

    def step(self, action: Answer, timeout_s: float | None = None, **more: Any) -> Question:
        """Reward the share of the first 16 characters that are the letter; over all turns at most 1."""
        reward = action.answer[:LENGTH].count(self.letters[self.turn]) / LENGTH / TURNS
        self.turn += 1
        over = self.turn == TURNS
        return Question(question="" if over else f"{self.letters[self.turn]}=", reward=reward, done=over)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)


if __name__ == "__main__":
    app = create_fastapi_app(Letters, Answer, Question, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
