"""Does a training run that is killed and resumed differ from an undisturbed run?

Runs `trinity-es demo` (a real vLLM engine, a real trainer) to its end; then again in another folder, where at `kills`
random moments all its processes are killed with SIGKILL at once (the command with its trainer, the keeper, the
actors, the engine), and `trinity-es resume` continues the run. Both logs are then compared: how often each prompt of
the taskset was used for training (`prompts_used`), which steps were trained on and in which order, which tasks
finished twice, what `verify` finds, and the final reward.

`python -m benchmarks.interrupted [--steps 160] [--kills 1] [--undisturbed 1] [--seed 0] [--engine vllm] [--json FILE]`.
With several undisturbed runs (of the next seeds) the killed run's final reward should lie within theirs. The exit code
is 1 if the runs differ in anything but the reward: an engine samples other tokens if it batches other requests.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from benchmarks.child_processes import environment_without
from benchmarks.compared import options_of, write_json
from tests.helpers.prompts import prompts_used
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.projections.reading.log_reader import Log
from trinity_es.system import running_system
from trinity_es.system.leftovers import leftovers

STEP_SECONDS = 30.0
"""Time limit for a step of the demo; a run without progress for this time is given up."""
LOAD_SECONDS = 180.0
"""Time limit for the first step, while the engine loads."""


def start_command(*args: object, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trinity_es", *map(str, args)], cwd=cwd, env=environment_without("TRINITY_ES_LOG"),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def submitted_steps(config: Config) -> int:
    try:
        with trinity_es.open_log(config.store.url) as log:
            return sum(b.batch_type == "train" for b in log.batches())
    except trinity_es.TrinityError:  # the log is being created
        return 0


def wait_for_step(config: Config, step: int, running: subprocess.Popen[str]) -> None:
    """Wait until this step is in the log. Raises RuntimeError if the run ends or makes no progress."""
    first = seen = submitted_steps(config)
    since = time.monotonic()
    while (now := submitted_steps(config)) < step:
        if now > seen:
            seen, since = now, time.monotonic()
        if running.poll() is not None:
            raise RuntimeError(f"the run ended (exit {running.returncode}) at step {seen}, before step {step}")
        if time.monotonic() - since > (LOAD_SECONDS if seen == first else STEP_SECONDS):
            raise RuntimeError(f"the run stood still at step {seen}, before step {step}")
        time.sleep(0.02)


def kill_all(config: Config, running: subprocess.Popen[str]) -> int:
    """Kill all processes of a run at once with SIGKILL, and return their number."""
    kept = running_system.keeper(config)
    everybody = {psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True),
                 *leftovers(config), *([psutil.Process(kept)] if kept else [])}
    for process in everybody:
        process.suspend()  # so that none reacts to the death of another
    for process in everybody:
        process.kill()
    running.communicate(timeout=30)
    return len(everybody)


def trained_steps(log: Log) -> list[int]:
    """Return the steps from which the trainer's last weights learnt, in order.

    A trainer that was killed before it saved a step's weights goes back to its checkpoint. The steps after the
    checkpoint are delivered again, and the trainer repeats them.
    """
    steps: list[int] = []
    for recorded in log.read(types=["BatchTrained", "ExperiencesRedelivered"]):
        if isinstance(recorded.event, ev.ExperiencesRedelivered):
            steps = [step for step in steps if step not in recorded.event.batches]
        else:
            steps.append(int(recorded.stream.split("/")[1]))
    return steps


def figures_of(config: Config) -> dict[str, Any]:
    with trinity_es.open_log(config.store.url) as log:
        trained = trained_steps(log)
        finished = Counter((r.stream, r.event.task) for r in log.read(types=["TaskFinished"]))
        rewards = {str(b.batch_id): b.reward for b in log.batches() if b.batch_type == "eval"}
        return {
            "steps_trained": sorted(set(trained)), "in_order": trained == sorted(trained),
            "times_trained": max(Counter(trained).values(), default=0),
            "prompts_used": prompts_used(log, "letters"), "tasks_finished": len(finished),
            "finished_twice": sum(n > 1 for n in finished.values()), "complaints": len(log.verify()),
            "evals": sorted(rewards), "reward_before": rewards.get("0/letters"),
            "reward_after": list(rewards.values())[-1] if rewards else None,
            "decisions": dict(Counter(r.event.decision for r in log.read(types=["RecoveryDecided"]))),
        }


def play_demo(folder: Path, *, steps: int, seed: int, engine: str, moments: list[tuple[int, float]]) -> dict[str, Any]:
    """Run the demo in `folder`, kill and resume it at each moment (step, seconds after submit), and return figures."""
    began, killed = time.monotonic(), []
    first = ["demo", "--dir", folder, "--steps", steps, "--seed", seed, "--engine", engine, "--json"]
    path = folder / "config.yaml"
    running = start_command(*first, cwd=folder.parent)
    try:
        for step, delay in moments:
            while not path.is_file() and running.poll() is None:
                time.sleep(0.02)
            config = load_config(path)
            wait_for_step(config, step, running)
            time.sleep(delay)
            count = kill_all(config, running)
            killed.append({"step": step, "processes": count, "reached": submitted_steps(config)})
            print(f"  killed {count} processes at step {killed[-1]['reached']}, {delay:.2f} s into it", flush=True)
            running = start_command("resume", path, "--json", cwd=folder.parent)
        out, _ = running.communicate(timeout=60.0 + STEP_SECONDS * steps)
    finally:
        if running.poll() is None:
            running.kill()
        end_system(load_config(path))
    told = json.loads(out) if out.strip() else {}
    return {"exit": running.returncode, "seconds": time.monotonic() - began, "killed": killed,
            "verdict": told.get("verdict"), **figures_of(load_config(path))}


SAME = ("steps_trained", "in_order", "times_trained", "prompts_used", "tasks_finished", "finished_twice", "complaints",
        "evals")
"""Figures that must be equal in both runs."""


def compare(*, steps: int, kills: int, undisturbed: int, seed: int, engine: str) -> dict[str, Any]:
    chance = random.Random(seed)
    moments = [(step, chance.uniform(0.0, 0.3)) for step in sorted(chance.sample(range(2, steps), kills))]
    with tempfile.TemporaryDirectory(prefix="interrupted-") as name:
        runs = []
        for number in range(undisturbed):
            print(f"undisturbed, {number + 1} of {undisturbed}: {steps} steps", flush=True)
            folder = Path(name) / f"calm-{number}"
            runs.append(play_demo(folder, steps=steps, seed=seed + number, engine=engine, moments=[]))
            print(f"  {runs[-1]['seconds']:.0f} s, final reward {runs[-1]['reward_after']}", flush=True)
        print(f"killed at {', '.join(f'step {s}' for s, _ in moments)}", flush=True)
        rough, calm = play_demo(Path(name) / "rough", steps=steps, seed=seed, engine=engine, moments=moments), runs[0]
    differ = [key for key in SAME if calm[key] != rough[key]]
    return {"calm": calm, "rough": rough, "differ": differ, "rewards": [run["reward_after"] for run in runs]}


def comparison_text(found: dict[str, Any]) -> str:
    lines = [f"{'':<26}{'undisturbed':>16}{'killed, resumed':>18}"]

    def row(name: str, tell: Any) -> None:
        lines.append(f"{name:<26}{tell(found['calm'])!s:>16}{tell(found['rough'])!s:>18}")

    def uses(run: dict[str, Any]) -> str:
        return ", ".join(f"{n} x {k}" for k, n in sorted(Counter(run["prompts_used"].values()).items()))

    row("seconds", lambda r: round(r["seconds"]))
    row("processes killed", lambda r: sum(k["processes"] for k in r["killed"]))
    row("steps trained", lambda r: len(r["steps_trained"]))
    row("each once and in order", lambda r: r["in_order"] and r["times_trained"] == 1)
    row("prompts x times used", uses)
    row("tasks finished", lambda r: r["tasks_finished"])
    row("tasks finished twice", lambda r: r["finished_twice"])
    row("complaints of verify", lambda r: r["complaints"])
    row("evals", lambda r: len(r["evals"]))
    row("eval reward before", lambda r: f"{r['reward_before']:.3f}")
    row("eval reward after", lambda r: f"{r['reward_after']:.3f}")
    row("exit", lambda r: r["exit"])
    least, most = min(found["rewards"]), max(found["rewards"])
    within = "within" if least <= found["rough"]["reward_after"] <= most else "outside of"
    lines.append(f"eval reward after the kills: {within} {least:.3f} - {most:.3f} of {len(found['rewards'])} others")
    lines.append(f"decisions after the kills: {found['rough']['decisions']}")
    lines.append("they differ in: " + (", ".join(found["differ"]) or "nothing"))
    return "\n".join(lines)


def main() -> int:
    options = options_of(__doc__, [("--engine", {"choices": ["vllm", "scripted"], "default": "vllm"})], quick=False,
                         steps=160, kills=1, undisturbed=1, seed=0)
    found = compare(steps=options.steps, kills=options.kills, undisturbed=options.undisturbed, seed=options.seed,
                    engine=options.engine)
    print(comparison_text(found))
    write_json(options.json, found)
    return 1 if found["differ"] or found["rough"]["exit"] != found["calm"]["exit"] else 0


if __name__ == "__main__":
    sys.exit(main())
