"""Does TRL's GRPOTrainer, killed at random, train on the same prompts as undisturbed? With trinity_es, and alone.

The trainer of examples/trl_grpo (`benchmarks.trl_recorded`) notes the rows of each generation that it trains on.
Meanwhile the trainer, a runner, the coordinator, or all of them at once are killed with SIGKILL, seeded. They are
started again by the example's own command or by the system itself. A killed trainer repeats the steps since its
checkpoint, so only the last training of each step counts. The result lists:

- other prompts: steps trained on other rows than in an undisturbed run, and rows of the data set that were trained on
  more or less often than there
- steps beyond the end: steps of a trainer that was killed after its last step
- generated again: steps that were repeated with other tokens than before
- submitted or run twice: batches and runs that are in the log more than once
- did not start: restarts of the trainer that ended with an error

`--alone` uses the same trainer with TRL's own generation; then its only process is killed each time.

    python -m benchmarks.trl_kills [--kills 20] [--undisturbed 5] [--seed 0] [--steps 100] [--alone] [--json FILE]

It needs trl beside vLLM, `pip install trl==1.16.0`. The exit code is 1 if a list has an entry, or if the killed run's
reward is below those of all undisturbed runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

import trinity_es
from benchmarks.chaos_faults import by_kind, kill
from benchmarks.compared import options_of, write_json
from trinity_es import Config, load_config
from trinity_es.client.teardown import end_system
from trinity_es.events import vocabulary as ev

KINDS = ("trainer", "runner", "coordinator", "all")
RESTARTS = 3
"""Maximum number of consecutive failed starts before a run is given up."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "trl_grpo" / "config.yaml"


def _launch(arguments: list[str], output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=errors, start_new_session=True)


class Trainee:
    """A trainer in a folder, and its process, which is killed and started again."""

    def __init__(
        self, folder: Path, overrides: list[str], settings: dict[str, Any], *, alone: bool = False,
        launch: Callable[[list[str], IO[bytes], IO[bytes]], Any] = _launch,
    ) -> None:
        """Prepare a trainer. `launch(arguments, stdout, stderr)` starts `python ARGUMENTS` and returns the process."""
        self.folder, self.alone, self.settings, self.launch = folder, alone, settings, launch
        self.overrides = ["system.detach=true", *overrides]
        folder.mkdir(parents=True, exist_ok=True)
        self.process: Any = None
        self.starts, self.failed = 0, 0

    @property
    def config(self) -> Config:
        return load_config(EXAMPLE, [
            f"model.model_path={self.folder}/model", f"store.url=sqlite:///{self.folder}/log.sqlite", *self.overrides])

    def start(self) -> None:
        given = {"alone": self.alone, "overrides": self.overrides, "settings": self.settings}
        with (self.folder / "trainer.log").open("ab") as log:
            self.process = self.launch(["-m", "benchmarks.trl_recorded", str(self.folder), json.dumps(given)], log, log)
        self.starts += 1

    def step(self) -> int:
        """Return the last step that the current process finished; -1 before its first."""
        with contextlib.suppress(OSError, ValueError):
            pid, step = (self.folder / "beat").read_text().split()
            if self.process is not None and int(pid) == self.process.pid:
                return int(step)
        return -1

    def wait_for_step(self, step: int, seconds: float) -> bool:
        """Wait until a step is finished, and restart a trainer that has died. Return False if the trainer is complete.

        Raises RuntimeError if it does not start, TimeoutError after `seconds`.
        """
        deadline, in_a_row = time.monotonic() + seconds, 0
        while self.step() < step:
            code = None if self.process is None else self.process.poll()
            if code == 0:
                return False
            if self.process is None or code is not None:
                if code is not None and code != -signal.SIGKILL:
                    self.failed, in_a_row = self.failed + 1, in_a_row + 1
                if in_a_row > RESTARTS:
                    raise RuntimeError(f"the trainer does not start: {self.log_end()}")
                self.start()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for step {step}, last {self.step()}: {self.log_end()}")
            time.sleep(0.02)
        return True

    def log_end(self) -> str:
        return (self.folder / "trainer.log").read_text(errors="replace")[-3000:]

    def kill(self, kind: str) -> None:
        """Kill the trainer, a kind of the system's processes, or all of them with SIGKILL."""
        victims: list[psutil.Process] = []
        if kind in ("trainer", "all") or self.alone:
            with contextlib.suppress(psutil.NoSuchProcess):  # the trainer has just ended by itself
                victims = [psutil.Process(self.process.pid)] if self.process is not None else []
        if not self.alone and kind != "trainer":
            system = by_kind(self.config)
            victims += [p for group in system.values() for p in group] if kind == "all" else system.get(kind, [])
        kill(victims)
        if self.process is not None and (kind in ("trainer", "all") or self.alone):
            self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if not self.alone:
            end_system(self.config)


def kill_while_training(
    trainee: Trainee, kinds: list[str], chance: random.Random, *, seconds: float = 900.0
) -> list[tuple[int, str]]:
    """Train to the end, and kill one of `kinds` after the other on the way. Return (step, kind) of each kill.

    `seconds`: time limit for the trainer to reach a step.
    """
    last = int(trainee.settings["max_steps"])
    steps = sorted(chance.randrange(1, last) for _ in kinds)
    killed: list[tuple[int, str]] = []
    for kind, step in zip(kinds, steps, strict=True):
        if not trainee.wait_for_step(step - 1, seconds):
            break
        began = time.monotonic()
        if not trainee.wait_for_step(step, seconds):
            break
        pace = min(time.monotonic() - began, 1.0)  # a step's duration; 0 for a second kill at the same step
        time.sleep(chance.uniform(0.0, pace))  # a random moment of the next step
        trainee.kill(kind)
        killed.append((trainee.step(), kind))
    trainee.wait_for_step(last + 1, seconds)
    return killed


def training_figures(trainee: Trainee, plan: dict[int, list[int]] | None) -> dict[str, Any]:
    """Return the figures of a run, and its deviations from `plan`, {step: rows} of an undisturbed run."""
    last = int(trainee.settings["max_steps"])
    lines = [json.loads(line) for line in (trainee.folder / "trained.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["train"]]
    steps = {line["step"]: line["rows"] for line in lines}
    tokens: dict[int, set[str]] = {}
    for line in lines:
        tokens.setdefault(line["step"], set()).add(json.dumps([line["rows"], line["ids"], line["rewards"]]))
    found: dict[str, Any] = {
        "reward": json.loads((trainee.folder / "done.json").read_text())["reward"],
        "steps": len(steps), "trained": len(lines), "starts": trainee.starts, "did not start": trainee.failed,
        "generated again": sorted(step for step, seen in tokens.items() if len(seen) > 1),
        "steps beyond the end": sorted(step for step in steps if step >= last),
        "other prompts": [], "rows too often": 0, "rows too seldom": 0,
    }
    if plan is not None:
        both = plan.keys() | steps.keys()
        found["other prompts"] = sorted(step for step in both if plan.get(step) != steps.get(step))
        planned, had = (Counter(row for rows in of.values() for row in rows) for of in (plan, steps))
        found["rows too often"], found["rows too seldom"] = len(had - planned), len(planned - had)
    if not trainee.alone:
        found |= _repeated_work(trainee.config)
    return {**found, "plan": steps}


def _repeated_work(config: Config) -> dict[str, Any]:
    submitted: Counter[str] = Counter()
    ran: Counter[tuple[str, int, int]] = Counter()
    with trinity_es.open_log(config.store.url) as log:
        for recorded in log.events():
            if isinstance(recorded.event, ev.BatchSubmitted):
                submitted[recorded.stream] += 1
            elif isinstance(recorded.event, ev.RunsFinished):
                ran.update((recorded.stream, recorded.event.task, run.run) for run in recorded.event.runs)
        problems = log.verify()
    return {"submitted twice": [name for name, n in submitted.items() if n > 1],
            "run twice": [list(run) for run, n in ran.items() if n > 1], "log": problems}


WRONG = ("other prompts", "steps beyond the end", "generated again", "submitted twice", "run twice", "log",
         "did not start")


def main() -> int:
    args = options_of(__doc__, [
        ("--alone", {"action": "store_true"}), ("--folder", {"type": Path}),
        ("--set", {"action": "append", "default": [], "help": "an override of the example's config"}),
    ], quick=False, kills=20, undisturbed=5, seed=0, steps=100)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="trl-kills-")).absolute()
    told: dict[str, Any] = {"kills": args.kills, "seed": args.seed, "steps": args.steps, "alone": args.alone}
    rewards, plan = [], None
    for i in range(args.undisturbed):
        settings = {"max_steps": args.steps}
        trainee = Trainee(
            folder / f"undisturbed-{i}", [*args.set, f"explorer.rollout_model.seed={i}"], settings, alone=args.alone)
        began = time.monotonic()
        found = _run(trainee, [], random.Random(i), None)
        plan = plan or found["plan"]
        rewards.append(found["reward"])
        print(f"undisturbed {i}: reward {found['reward']:.3f} in {time.monotonic() - began:.0f} s", flush=True)
    chance = random.Random(args.seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(args.kills)]
    chance.shuffle(kinds)
    trainee = Trainee(folder / "killed", args.set, {"max_steps": args.steps}, alone=args.alone)
    began = time.monotonic()
    found = _run(trainee, kinds, chance, plan)
    found.pop("plan")
    told |= {"undisturbed": rewards, "killed": found, "seconds": round(time.monotonic() - began)}
    print(json.dumps(told, indent=1))
    write_json(args.json, told)
    if args.folder is None:
        shutil.rmtree(folder)
    return int(any(found.get(name) for name in WRONG) or found["reward"] < min(rewards, default=0.0))


def _run(
    trainee: Trainee, kinds: list[str], chance: random.Random, plan: dict[int, list[int]] | None
) -> dict[str, Any]:
    try:
        return {"killed": kill_while_training(trainee, kinds, chance), **training_figures(trainee, plan)}
    finally:
        trainee.end()


if __name__ == "__main__":
    sys.exit(main())
