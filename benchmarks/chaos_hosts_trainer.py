"""The trainer of `benchmarks.chaos_hosts`: a process on one of the hosts, which may die at any moment.

It keeps some batches in flight and prints a line of JSON for each answer that it gets: `{"submitted": batch}`,
`{"finalized": batch, "result": {...}}`, `{"trouble": text}`. The next trainer, on another host, gets the open batches
as `--lanes`. After the line `end` on standard input it submits no more batches, finalizes the open ones, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import trinity_es
from trinity_es import Task, Workflow
from trinity_es.events.errors import BatchAlreadyActive, TrinityError
from trinity_es.events.experience import EID, Experience

HOST_VARIABLE = "CHAOS_HOST"
"""Environment variable in which a host's processes find its name."""
PATIENCE_SECONDS = 300.0
"""Seconds for which a submit or a finalize is repeated; after that the run counts as needing a person."""


class Nap(Workflow):
    """Workflow that sleeps on the engine's loop, and notes its host, begin and end."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        args, began = self.task.workflow_args, note_start(self.task)
        await asyncio.sleep(args["seconds"])
        _note(f"{args['notes']}/slept", f"{os.environ.get(HOST_VARIABLE)} {began} {time.monotonic()}")
        return one_experience()


def note_start(task: Task) -> float:
    """Note in a file that a run of a task begins. Return the monotonic time, which all processes share."""
    began = time.monotonic()
    _note(f"{task.workflow_args['notes']}/ran", f"{task.batch_id} {task.task_id} {began}")
    return began


def _note(path: str, line: str) -> None:
    with open(path, "a") as f:
        f.write(line + "\n")


def one_experience() -> list[Experience]:
    tokens = np.arange(16, dtype=np.int32)
    return [Experience(eid=EID(), tokens=tokens, prompt_length=8, reward=1.0, metrics={"reward": 1.0})]


def repeat_until_answered(
    config: trinity_es.Config, ask: Callable[[trinity_es.RolloutClient], Any], seconds: float,
    again: Callable[[], None] = lambda: None,
) -> Any:
    """Repeat a request for up to `seconds` until the system answers; call `again` between tries. Return the answer."""
    until = time.monotonic() + seconds
    while True:
        try:
            with trinity_es.connect(config) as client:
                return ask(client)
        except BatchAlreadyActive:
            return None  # an earlier try reached the system, and only its answer was lost
        except (TrinityError, TimeoutError, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
            again()


class _Trainer:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.over, self._printing = given, threading.Event(), threading.Lock()
        self.config = trinity_es.Config.from_dict(
            {
                "mode": "explore", "explorer": {"rollout_model": {"engine_type": "scripted"}},
                "store": {"url": given.url},
            },
            folder=given.folder,
        )

    def say(self, **said: Any) -> None:
        with self._printing:
            print(json.dumps(said), flush=True)

    def request(self, ask: Callable[[trinity_es.RolloutClient], Any]) -> Any:
        return repeat_until_answered(self.config, ask, PATIENCE_SECONDS)

    def play_lane(self, batch: int, is_submitted: bool) -> None:
        """Submit and finalize one batch after the other, until `over` is set."""
        while is_submitted or not self.over.is_set():
            tasks = [
                Task(workflow="benchmarks.chaos_hosts_trainer:Nap",
                     workflow_args={"notes": self.given.notes, "seconds": self.given.seconds})
                for _ in range(self.given.tasks)
            ]
            try:
                if not is_submitted:
                    self.request(lambda c, b=batch, t=tasks: c.submit_batch(batch_id=b, tasks=t, batch_type="train"))
                    self.say(submitted=batch)
                result = self.request(lambda c, b=batch: c.finalize_train_batch(b, timeout=60))
                self.say(finalized=batch, result=result)
            except Exception as e:
                self.say(trouble=f"batch {batch}: {type(e).__name__}: {e}")
                return
            batch, is_submitted = batch + self.given.every, False

    def run(self) -> None:
        lanes = [threading.Thread(target=self.play_lane, args=lane) for lane in json.loads(self.given.lanes)]
        for lane in lanes:
            lane.start()
        threading.Thread(target=lambda: (sys.stdin.readline(), self.over.set()), daemon=True).start()
        for lane in lanes:
            lane.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "folder", "notes", "lanes"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="between the numbers of a lane's batches")
    parser.add_argument("--seconds", type=float, required=True, help="that a task takes")
    _Trainer(parser.parse_args()).run()
