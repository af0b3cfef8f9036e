"""Schedules: the batches, requests and faults of one run. A seed always gives the same schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from tests.simulation import doubles
from tests.simulation.invariants import Invariants
from tests.simulation.trainer import BatchPlan, Trainer
from tests.simulation.world import MessageFault, Violation, World
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.messages import Retire

PATIENCE = 1500.0
"""Virtual seconds after the last fault in which every batch has to be finalized. Hangs take their timeouts, a process
that never starts is noticed after a minute, and a runner that died often is restarted after up to a minute."""

DULL = ("Heartbeat", "Where", "WhereReply", "EndedRunners")
PROCESS_FAULTS = ("kill_runner", "kill_coordinator", "kill_guardian", "kill_all", "stop_coordinator", "stop_runner",
                  "takeover", "retire", "still_born")
NETWORK_FAULTS = ("lose", "duplicate", "delay", "disorder")
DATABASE_FAULTS = ("database_away", "error", "error_after", "fail", "fail_after")


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a schedule. `number`: the n-th effect or message after `at`, which it hits. `who`: slot of a runner."""

    kind: str
    at: float
    number: int = 0
    seconds: float = 0.0
    who: int = 0

    def __str__(self) -> str:
        more = f" #{self.number}" if self.number else ""
        return f"{self.kind}{more} at {self.at:.2f} s" + (f" for {self.seconds:.1f} s" if self.seconds else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    runners: int
    places: int
    attempts: int
    runs_per_unit: int | None
    batches: tuple[BatchPlan, ...]
    faults: tuple[Fault, ...]
    sync_at: float | None = None
    restart_at: float | None = None
    """Time at which a client restarts the first runner."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.runners} runners of {self.places} places, {self.attempts} attempts"]
        lines += [f"  {b}" for b in self.batches]
        lines += [f"  sync_weights at {self.sync_at:.2f} s"] if self.sync_at is not None else []
        lines += [f"  restart_runner at {self.restart_at:.2f} s"] if self.restart_at is not None else []
        lines += [f"  fault: {f}" for f in self.faults]
        return "\n".join(lines)


@dataclass(slots=True)
class Run:
    """Outcome of a schedule."""

    schedule: Schedule
    violation: str | None
    struck: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0


def make(seed: int, *, stress: bool = False) -> Schedule:
    """Return the schedule of a seed: with 0 to 4 faults, or with `stress` 3 to 8."""
    rng = Random(seed)
    batches = tuple(_batch(rng, number) for number in range(rng.choice((1, 1, 2, 3))))
    faults = [_fault(rng) for _ in range(rng.randint(3, 8) if stress else rng.choice((0, 1, 1, 2, 2, 3, 4)))]
    return Schedule(
        seed=seed,
        runners=rng.choice((1, 2, 2, 3)),
        places=rng.choice((1, 2, 4)),
        attempts=rng.choice((2, 3)),
        runs_per_unit=rng.choice((None, 1)),
        batches=batches,
        faults=tuple(sorted(faults, key=lambda f: f.at)),
        sync_at=rng.uniform(0.5, 4.0) if rng.random() < (0.6 if stress else 0.25) else None,
        restart_at=rng.uniform(0.5, 4.0) if rng.random() < (0.4 if stress else 0.15) else None,
    )


def _batch(rng: Random, number: int) -> BatchPlan:
    batch_type = rng.choice(("train", "train", "eval", "collect"))
    runs = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rng.choice((1, 2, 3, 5))))
    return BatchPlan(
        batch_id=f"{number}/sim" if batch_type == "eval" else number,
        batch_type=batch_type,
        runs=runs,
        start=rng.uniform(0.2, 2.0),
        min_wait=rng.randint(0, len(runs)) if rng.random() < 0.2 else None,
        timeout=rng.choice((0.5, 3.0)) if rng.random() < 0.4 else None,
        abort_after=rng.uniform(0.0, 4.0) if rng.random() < 0.08 else None,
    )


def _fault(rng: Random) -> Fault:
    kind = rng.choice(rng.choice((PROCESS_FAULTS, PROCESS_FAULTS, NETWORK_FAULTS, DATABASE_FAULTS)))
    at = rng.uniform(0.3, 6.0)
    number = rng.choice((0, 1, 2, 3, 5, 8, 13)) if kind in NETWORK_FAULTS or kind.startswith("kill") else 0
    seconds = 0.0
    if kind in ("stop_coordinator", "stop_runner", "takeover"):
        seconds = rng.choice((0.5, 3.0, 12.0))
    elif kind in ("delay", "disorder", "database_away"):
        seconds = rng.choice((0.3, 2.0, 8.0))
    elif kind == "retire":
        seconds = rng.uniform(0.5, 6.0)
    return Fault(kind, at, number, seconds, rng.randrange(3))


# --- running ----------------------------------------------------------------------------------------------------------
@functools.cache
def _launched() -> LaunchedConfig:
    """Return the actors' config, with timeouts that make a schedule short."""
    from trinity_es.config.config import Config
    from trinity_es.system import launch

    made = launch.launched_config(Config.from_dict({
        "project": "sim", "name": "sim", "checkpoint_root_dir": "/nowhere", "mode": "explore",
        "model": {"model_path": "none"},
        "explorer": {"rollout_model": {"engine_type": "scripted"}, "max_timeout": 6.0,
                     "dynamic_timeout": {"enable": True, "ratio": 4.0, "warmup_min_steps": 1},
                     "over_rollout": {"wait_after_min": 1.0}},
        "system": {"heartbeat_timeout": 6.0, "hang_timeout": 20.0, "restarts": 40, "restart_pause": 0.2},
        "store": {"retry_for": 4.0},
    }, folder="/"))
    return made.model_copy(update={"memory": ""})  # there is no shared memory here


def config_of(schedule: Schedule) -> LaunchedConfig:
    made = _launched()
    explorer = made.explorer
    over = explorer.over_rollout.model_copy(update={"return_partial_tasks": schedule.seed % 2 == 0})
    explorer = explorer.model_copy(update={
        "max_concurrency": schedule.places, "max_retry_times": schedule.attempts - 1,
        "max_repeat_times_per_runner": schedule.runs_per_unit, "over_rollout": over,
        "rollout_model": made.rollout.model_copy(update={"engine_num": schedule.runners}),
    })
    return made.model_copy(update={"explorer": explorer})


def run(schedule: Schedule, *, tracing: bool = False) -> Run:
    """Run a schedule. The doubles must be installed."""
    world = World(schedule.seed, config_of(schedule), tracing=tracing)
    world.invariants = invariants = Invariants(world)
    last = max((f.at + f.seconds for f in schedule.faults), default=0.0)
    violation = None
    with doubles.running(world):
        world.trainer = Trainer(world, schedule.batches, schedule.sync_at, schedule.restart_at)
        world.start_system()
        for fault in schedule.faults:
            world.later(fault.at, None, "", lambda f=fault: strike(world, f))
        try:
            deadline = max(last, 6.0) + PATIENCE
            while world.now < last or invariants.unfinished() is not None:
                for _ in range(16):
                    world.step()
                if world.now > deadline:
                    raise Violation(f"not over after {world.now:.0f} s: {invariants.unfinished()} (promise 4)")
            invariants.at_the_end()
        except Violation as e:
            violation = str(e)
    return Run(schedule, violation, world.struck, world.trace, world.now, world.steps)


def strike(world: World, fault: Fault) -> None:
    """Apply a fault now."""
    kind = fault.kind
    if kind in ("lose", "duplicate", "delay"):
        world.message_faults.append(MessageFault(kind, fault.number, fault.seconds))
    elif kind == "disorder":
        world.strike(kind)
        world.disorder_until = world.now + fault.seconds
    elif kind == "database_away":
        world.strike(kind)
        world.store.away = True

        def back() -> None:
            world.store.away = False

        world.later(fault.seconds, None, "the database is back", back)
    elif kind in DATABASE_FAULTS:
        world.strike(kind)
        world.store.faults.append(kind)
    elif kind == "still_born":
        world.still_born += 1
    else:
        _strike_process(world, fault)


def _strike_process(world: World, fault: Fault) -> None:
    kind = fault.kind
    if kind == "kill_all":
        world.strike(kind)
        world.trainer.forget()
        kind = "kill_guardian"
    who = {"kill_guardian": "guardian", "takeover": "guardian", "retire": "guardian"}.get(kind)
    if who is None:
        who = "coordinator" if kind.endswith("coordinator") else f"runner-{fault.who % world.config.rollout.engine_num}"
    process = world.find(who)
    if process is None:
        return
    if kind.startswith("kill"):
        process.effects_left = fault.number
        if fault.number == 0:
            world.strike(kind)
            world.kill(process)
    elif kind == "takeover":
        world.strike(kind)
        for one in [p for p in world.processes.values() if p.alive and p.system == process.system]:
            world.stop(one, fault.seconds)
        world.trainer.coordinator = None
        world.later(0.3, None, "another system is started", lambda: world.start_system(beside=True))
    elif kind == "retire":
        world.strike(kind)
        world.later(0.0, process, "is retired", lambda: process.receiver.receiveMessage(Retire(), None))
        world.later(fault.seconds, None, "the system is shut down", lambda: world.kill(process))
    else:
        world.strike(kind)
        world.stop(process, fault.seconds)


# --- shrinking --------------------------------------------------------------------------------------------------------
def shrink(schedule: Schedule, most: int = 150) -> Run:
    """Simplify a failing schedule step by step while it still fails. Return the run of the last one, with its trace."""
    left = most
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(schedule):
            left -= 1
            if left <= 0:
                break
            if run(candidate).violation is not None:
                schedule, smaller = candidate, True
                break
    return run(schedule, tracing=True)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for i in range(len(schedule.faults)):
        yield replace(schedule, faults=schedule.faults[:i] + schedule.faults[i + 1 :])
    if len(schedule.batches) > 1:
        for i in range(len(schedule.batches)):
            yield replace(schedule, batches=schedule.batches[:i] + schedule.batches[i + 1 :])
    if schedule.sync_at is not None:
        yield replace(schedule, sync_at=None)
    if schedule.restart_at is not None:
        yield replace(schedule, restart_at=None)
    for i, batch in enumerate(schedule.batches):
        for runs in _fewer(batch.runs):
            plan = replace(batch, runs=runs)
            yield replace(schedule, batches=(*schedule.batches[:i], plan, *schedule.batches[i + 1 :]))
        for plan in (replace(batch, timeout=None), replace(batch, abort_after=None), replace(batch, min_wait=None)):
            if plan != batch:
                yield replace(schedule, batches=(*schedule.batches[:i], plan, *schedule.batches[i + 1 :]))
    if schedule.runners > 1:
        yield replace(schedule, runners=schedule.runners - 1)


def _fewer(runs: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(runs) > 1:
        yield runs[: len(runs) // 2]
        yield runs[1:]
    for i, n in enumerate(runs):
        if n > 1:
            yield (*runs[:i], 1, *runs[i + 1 :])


def told(result: Run, lines: int = 200) -> str:
    """Return the report of a failing run: schedule, trace without dull messages (`DULL`), and violation."""
    shown = [line for line in result.trace if not any(f"<- {dull} " in line for dull in DULL)]
    if len(shown) > lines:
        shown = [*shown[: lines - 40], f"... {len(shown) - lines} lines ...", *shown[-40:]]
    return "\n".join([str(result.schedule), "", *shown, "", f"VIOLATION: {result.violation}"])
