"""Runs of `trinity-es run` that are killed and resumed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import trinity_es
from tests.helpers import systems
from tests.helpers.handmade import ROOT, cli
from tests.helpers.prompts import prompts_used
from trinity_es import Explorer
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.system import leftovers
from trinity_es.testing import wait_until

ROWS = 14


def make_config(folder: Path, *, interval: int = 1, rows: int = ROWS, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"question {i}", "answer": "x"}) for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:4]))
    common = {"reward_fn": "tests.helpers.runs:early_letters", "rollout_args": {"max_tokens": 8}}
    config = {
        "mode": "both",
        "explorer": {"eval_interval": 2, "max_concurrency": 2, "rollout_model": {
            "engine_type": "scripted", "script": {"latency_seconds": 0.15},
        }},
        "buffer": {"batch_size": 3, "explorer_input": {
            "tasksets": [{"name": "questions", "path": "train.jsonl", "repeat_times": 2, "shuffle": True, **common}],
            "eval_tasksets": [{"name": "check", "path": "eval.jsonl", **common}],
        }},
        "synchronizer": {"sync_interval": interval},
        "trainer": {"class": "tests.helpers.runs:SteadyTrainer", "args": {"seconds": 0.3}, "keep_checkpoints": 2},
        "system": {"keeper": False},
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(*args: object, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    env.pop("TRINITY_ES_LOG", None)
    return subprocess.Popen(
        [sys.executable, "-m", "trinity_es", *map(str, args)], cwd=cwd, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )


def finish(*args: object, cwd: Path, **variables: str) -> tuple[int, str, str]:
    with command(*args, cwd=cwd, **variables) as running:
        out, err = running.communicate(timeout=120)
    return running.returncode, out, err


AT_ONCE = ("--set", "trainer.args.seconds=0", "--set", "explorer.rollout_model.script.latency_seconds=0")
"""Options that make the rest of a run as short as possible."""


def finish_here(*args: object, cwd: Path) -> tuple[int, str, str]:
    """Run a command in this process, to save the start of an interpreter. Return exit status, stdout and stderr."""
    done = cli(*args, cwd=cwd)
    return done.exit_code, done.stdout, done.stderr


def went_well(*args: object, cwd: Path) -> tuple[str, str]:
    """Run a command in this process that must succeed. Return stdout and stderr."""
    code, out, err = finish_here(*args, cwd=cwd)
    assert code == 0, err
    return out, err


def outcome(config: Config) -> dict[str, Any]:
    """Return the outcome of a run: the figures that must not depend on interruptions."""
    with trinity_es.open_log(config.store.url) as log:
        assert log.verify() == []
        batches = {b.batch_id: (b.state, b.reward, b.trained_step, b.model_version) for b in log.batches()}
        versions = [r.event.version for r in log.read(stream="weights") if isinstance(r.event, ev.WeightsPublished)]
        used = prompts_used(log, "questions")
    newest = config.checkpoint_dir / f"global_step_{max(versions)}"
    return {
        "batches": batches, "versions": versions, "used": used,
        "weights": json.loads((newest / "state.json").read_text()),
        "kept": sorted(p.name for p in config.checkpoint_dir.glob("global_step_*")),
    }


def outcomes(make: Callable[[Path, int], Path], folders: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Return a function from `sync_interval` to the outcome of an undisturbed run. `make` writes the config."""

    @functools.cache
    def get(interval: int) -> dict[str, Any]:
        path = make(folders.mktemp("undisturbed"), interval)
        went_well("run", path, *AT_ONCE, cwd=path.parent)
        found = outcome(load_config(path))
        assert found["used"] == dict.fromkeys(range(ROWS), 1)
        return found

    return get


def explored(explorer: Explorer) -> Explorer:
    """Run an explorer to its end, shut it down, and return it."""

    async def life() -> None:
        try:
            await explorer.prepare()
            await explorer.explore()
        finally:
            await explorer.shutdown()

    asyncio.run(life())
    return explorer


def events_of(config: Config, *types: str) -> list[tuple[str, Any]]:
    try:
        with trinity_es.open_log(config.store.url) as log:
            return [(r.stream, r.event) for r in log.read(types=types)]
    except trinity_es.TrinityError:  # the log is being made
        return []


def count(config: Config, kind: str, batch_id: BatchId) -> int:
    return sum(stream == batch_stream(batch_id) for stream, _ in events_of(config, kind))


class SteadyTrainer:
    """Trainer whose weights are a hash of all experiences in order, so equal weights mean equal runs."""

    def __init__(self, model_path: str, *, seconds: float = 0.0) -> None:
        self.weights, self.steps, self.seconds = "new", 0, seconds

    def load(self, path: str) -> None:
        state = json.loads((Path(path) / "state.json").read_text())
        self.weights, self.steps = state["weights"], state["steps"]

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        time.sleep(self.seconds)
        learnt = hashlib.sha256(self.weights.encode())
        for e in experiences:
            learnt.update(e.tokens.tobytes() + f"{e.eid.rid} {e.reward} {e.advantages}".encode())
        self.weights, self.steps = learnt.hexdigest(), self.steps + 1
        return {"loss": 1.0 / self.steps}

    def save(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        time.sleep(self.seconds)
        (Path(path) / "state.json").write_text(json.dumps({"weights": self.weights, "steps": self.steps}))


STEPS = 5
"""Number of steps: batches of 3 of 14 rows, the last one of 2."""


def early_letters(response: str, prompt: str, truth: str | None) -> float:
    return sum(c < "m" for c in response) / max(1, len(response))


def odd_question(response: str, prompt: str, truth: str | None) -> float:
    """Return 1 for every second row, so that a filter of rewards drops the other groups."""
    return float(int(prompt.split()[-1]) % 2)


def kill_run(config: Config, running: subprocess.Popen[str]) -> None:
    """Kill the command and all processes of the actor system with SIGKILL, at once."""
    systems.kill_all([psutil.Process(running.pid), *leftovers.leftovers(config)])
    running.communicate(timeout=30)
    if not config.system.keeper:  # the keeper would start the system again at once
        wait_until(lambda: leftovers.leftovers(config) == [], "every process to be gone")


def killed_when(reached: Callable[[Config], bool], path: Path, moment: str, timeout: float = 60) -> Config:
    """Start a run, kill its command and system when `reached` is True, and return the config."""
    config = load_config(path)
    with command("run", path, cwd=path.parent) as running:
        wait_until(lambda: reached(config) or running.poll() is not None, moment, timeout=timeout)
        assert running.poll() is None, running.communicate()
        kill_run(config, running)
    return config
