"""An OpenEnv server: three guesses, each rewarded by its letters "e". Arguments: port, maximum of sessions, a file for
a line at each begin and end of an episode, seconds between two pings.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

PORT, SESSIONS, NOTE, PING = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])


class Guess(Action):
    guess: str
    at: int | list[int] | None = None


class Shown(Observation):
    text: str


def noted(what: str) -> None:
    with NOTE.open("a") as f:
        f.write(f"{what}\n")


class Letters(Environment[Guess, Shown, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.fails = 0, ""
        if NOTE.with_name("refuse").exists():
            raise RuntimeError("no more of them")
        noted("begun")

    def reset(self, seed: int | None = None, episode_id: str | None = None, fails: str = "", **more: Any) -> Shown:
        self.turn, self.fails = 0, fails
        return Shown(text=f"{more.get('ask', 'guess')} {seed}")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Shown:
        self.turn += 1
        if self.turn == 2:
            if self.fails == "raise":
                raise RuntimeError("the game broke")
            if self.fails == "invalid":
                Shown.model_validate({"text": None})
            if self.fails == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fails == "hang":
                time.sleep(3)
        reward = None if self.fails == "no reward" else float(action.guess.count("e"))
        return Shown(text=f"turn {self.turn}", reward=reward, done=self.turn == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)

    def close(self) -> None:
        noted("over")


app = create_fastapi_app(Letters, Guess, Shown, max_concurrent_envs=SESSIONS)
uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", ws_ping_interval=PING, ws_ping_timeout=PING)
