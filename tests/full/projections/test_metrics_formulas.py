"""C4: the numbers of a batch, from experiences through events and log to its result, against formulas in fractions.

The reference shares no code: best@k's 1,000 draws come from the standard library's Mersenne Twister.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import Task, batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import canonical, open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import ManualClock, ScriptedEngine
from trinity_es.workflows.workflow import Workflow

HOWS = ("mean", "sum", "max", "min", "last")
CLOCK = ManualClock()


# --- the reference --------------------------------------------------------------------------------------------------
Metrics = dict[str, Fraction]


def split(key: str) -> tuple[str, str]:
    """Name and aggregation: a suffix that is none of the five belongs to the name."""
    name, _, how = key.rpartition(":")
    return (name, how) if how in HOWS and name else (key, "mean")


def put_together(how: str, values: Sequence[Fraction]) -> Fraction:
    if how == "mean":
        return sum(values, Fraction()) / len(values)
    if how == "sum":
        return sum(values, Fraction())
    return {"max": max(values), "min": min(values), "last": values[-1]}[how]


def columns(rows: Sequence[Metrics]) -> dict[tuple[str, str], list[Fraction]]:
    out: dict[tuple[str, str], list[Fraction]] = {}
    for row in rows:
        for key, value in row.items():
            out.setdefault(split(key), []).append(value)
    return out


def std(values: Sequence[Fraction]) -> Fraction:
    mean = put_together("mean", values)
    return Fraction(math.sqrt(put_together("mean", [(v - mean) ** 2 for v in values])))


def over_parts(rows: Sequence[Metrics]) -> Metrics:
    """Experiences to a run, runs to a task of a training batch: the suffix stays, for the next level."""
    return {
        name if how == "mean" else f"{name}:{how}": put_together(how, values)
        for (name, how), values in columns(rows).items()
    }


def draws(n: int, k: int) -> Iterator[list[int]]:
    """1000 draws of k out of n with replacement by a Mersenne Twister seeded with 42: 32 bits, the low ones that n - 1
    needs, drawn again where they are n or more."""
    words = [42]
    for i in range(1, 624):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) % 2**32)
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    mask = (1 << (n - 1).bit_length()) - 1

    def one() -> int:
        while (drawn := twister.getrandbits(32) & mask) >= n:
            pass
        return drawn

    for _ in range(1000):
        yield [one() for _ in range(k)]


def eval_task(runs: Sequence[Metrics], n: int) -> Metrics:
    """Of n runs that were asked for; those that failed, or lack a metric, are in none of its values."""
    out: Metrics = {}
    for (name, how), values in columns(runs).items():
        if how != "mean" or name == "time/run_execution":
            out[name if how == "mean" else f"{name}:{how}"] = put_together(how, values)
            continue
        out[f"{name}/mean@{n}"] = put_together("mean", values)
        out[f"{name}/std@{n}"] = std(values)
        for k in sorted({k for k in (2, 4, 8, 16, 32, 64) if k < n} | ({n} if n > 1 else set())):
            drawn = [[values[i] for i in draw] for draw in draws(len(values), k)]
            out[f"{name}/best@{k}"] = put_together("mean", [max(d) for d in drawn])
            out[f"{name}/worst@{k}"] = put_together("mean", [min(d) for d in drawn])
    return out


def over_tasks(tasks: Sequence[Metrics], prefix: str, stats: Sequence[str]) -> dict[str, float]:
    out = {}
    for (name, how), values in columns(tasks).items():
        if how != "mean":
            out[f"{prefix}/{name}/{how}"] = put_together(how, values)
        elif not stats:
            out[f"{prefix}/{name}"] = put_together("mean", values)
        for stat in stats if how == "mean" else ():
            out[f"{prefix}/{name}/{stat}"] = std(values) if stat == "std" else put_together(stat, values)
    return {key: float(value) for key, value in out.items()}


# --- a batch at random ----------------------------------------------------------------------------------------------
numbers = st.floats(-1000, 1000, allow_subnormal=False).map(lambda v: round(v, 6)) | st.integers(-50, 50)
names = st.sampled_from(
    ["score", "score:mean", "tokens:sum", "worst:min", "best:max", "step:last", "a:b", "reward", "env/x", "env/x:sum"]
)
experiences = st.lists(st.tuples(st.dictionaries(names, numbers, max_size=4), st.none() | numbers), min_size=1,
                       max_size=3)  # fmt: skip
runs = st.tuples(experiences, st.integers(0, 4000).map(lambda ms: ms / 1000)) | st.none()
tasks = st.lists(st.lists(runs, min_size=1, max_size=5), min_size=1, max_size=4)
"""Tasks, each a list of runs: the (metrics, reward) of its experiences and the seconds it took; None: it failed."""


class Plays(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        played = self.task.workflow_args["runs"][self.run_id_base]
        if played is None:
            raise RuntimeError("it failed")
        rows, seconds = played
        CLOCK.advance(seconds)
        return [
            Experience(eid=EID(run=self.run_id_base, step=step), tokens=[1, 2], prompt_length=1, reward=reward,
                       metrics=dict(metrics))
            for step, (metrics, reward) in enumerate(rows)
        ]


async def played(batch: list[list[Any]], batch_id: int | str, order: random.Random) -> list[ev.Event]:
    """The events of these tasks, each run a unit of its own, as a runner would report them, in any order."""
    runner = WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), clock=CLOCK)
    events: list[ev.Event] = []
    left = {t: set(range(len(one))) for t, one in enumerate(batch)}
    units = [(t, r) for t, one in enumerate(batch) for r in range(len(one))]
    order.shuffle(units)
    for t, r in units:
        task = Task(workflow=Plays, workflow_args={"runs": batch[t]}, task_id=t)
        done = await runner.execute(task, batch_id, range(r, r + 1))
        left[t].discard(r)
        where = {"task": t, "run_id_base": r, "attempt": 1, "runner": "runner-0", "incarnation": 1}
        if done.failures:
            [(_, kind, message)] = done.failures
            events.append(ev.AttemptFailed(**where, failed_runs=[r], kind=kind, message=message, retry=False,
                                           seconds=done.seconds))
            continue
        finished = ev.RunsFinished if left[t] else ev.TaskFinished
        events.append(finished(**where, runs=done.results, payload=None, model_version=0, model_version_end=0,
                               seconds=done.seconds))
    return events


def wanted(batch: list[list[Any]], batch_id: int | str, detailed: bool) -> dict[str, float]:
    """The reference, from experiences to the batch."""
    is_eval = isinstance(batch_id, str)
    rows, failed, missing, completed = [], 0, 0, list[Metrics]()
    for task in batch:
        per_run, longest = [], Fraction()
        for run in (run for run in task if run is not None):
            seconds = Fraction(run[1])
            one = over_parts([
                {k: Fraction(v) for k, v in metrics.items() if reward is None or k != "reward"}
                | ({} if reward is None else {"reward": Fraction(reward)})
                for metrics, reward in run[0]
            ])
            per_run.append(one | {"time/run_execution": seconds})
            longest = max(longest, seconds)
        completed += per_run
        failed += len(per_run) < len(task)
        missing += len(task) - len(per_run)
        if per_run:
            of_task = eval_task(per_run, len(task)) if is_eval else over_parts(per_run)
            rows.append(of_task | {"time/task_execution": longest})
    prefix = f"eval/{str(batch_id).partition('/')[2]}" if is_eval else "rollout"
    if is_eval:
        out = over_tasks(rows, prefix, ("mean", "max", "min", "std") if detailed else ())
    else:
        out = over_tasks(rows, prefix, ("mean", "max", "min"))
    out |= {f"{prefix}/missing_run_count": float(missing)} if missing else {}
    for (name, how), values in columns(completed).items():
        if how == "mean" and len(values) < len(completed):
            out[f"{prefix}/{name}/missing_run_count"] = float(len(completed) - len(values))
    return out | {f"{prefix}/finished_task_count": float(len(batch)), f"{prefix}/failed_task_count": float(failed)}


def history(batch: list[list[Any]], batch_id: int | str, detailed: bool, order: random.Random) -> list[ev.Event]:
    submitted = ev.BatchSubmitted(
        batch_id=batch_id, batch_type="eval" if isinstance(batch_id, str) else "train", tasks=[{} for _ in batch],
        repeat_times=[len(one) for one in batch], runs_per_unit=1, detailed_stats=detailed,
    )
    units = [ev.Unit(task=t, run_id_base=r, runs=1, attempt=1) for t, one in enumerate(batch) for r in range(len(one))]
    sent = ev.TasksDispatched(runner="runner-0", incarnation=1, units=units, model_version=0)
    CLOCK.now = 0.0  # so that a time is the seconds that passed, not a difference of two large numbers
    return [submitted, sent, *asyncio.run(played(batch, batch_id, order))]


@settings(max_examples=25)
@given(tasks, st.sampled_from([(7, False), ("7/gsm8k", False), ("7/gsm8k", True)]), st.randoms(use_true_random=False))
def test_c4_p8_p30_p31_a_batch_s_numbers_are_those_of_the_formulas_and_of_its_replay(
    batch: list[list[Any]], what: tuple[int | str, bool], order: random.Random
) -> None:
    batch_id, detailed = what
    events = history(batch, batch_id, detailed, order)
    state = fold(events)
    result = batch_result(state)
    assert result["finished_task_count"] == len(batch)
    expected = wanted(batch, batch_id, detailed)
    assert set(result["metrics"]) == set(expected)
    for key, value in expected.items():
        assert result["metrics"][key] == pytest.approx(value, rel=1e-9, abs=1e-9), key

    events += [ev.BatchFinalizing(), ev.BatchFinalized(result=result)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "log.sqlite")
        with EventLog.open(path, create=True, durability="process", projectors=projectors()) as log:
            log.append([Write(stream=batch_stream(batch_id), expected_version=0, events=events)], commit_id="all")
        with open_log(path) as read:
            recorded, again = read.check_result(batch_id)
            replayed = read.replay(batch_id)
    assert canonical(recorded) == canonical(again) == canonical(result), "the same to the last bit"
    assert canonical(batch_result(replayed)) == canonical(result)


@pytest.mark.parametrize("n", [2, 3, 5, 16, 17])
def test_c4_p31_the_reference_draws_as_the_documentation_says(n: int) -> None:
    for k in (2, n):
        assert list(draws(n, k)) == np.random.RandomState(42).choice(n, (1000, k)).tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 33])
def test_c4_p31_an_eval_of_n_runs_has_mean_std_best_and_worst(n: int) -> None:
    chance = random.Random(n)
    batch = [[([({"score": chance.uniform(-5, 5)}, None)], 0.5) for _ in range(n)] for _ in range(2)]
    state = fold(history(batch, "1/x", False, chance))
    metrics = batch_result(state)["metrics"]
    ks = [k for k in (2, 4, 8, 16, 32) if k < n] + ([n] if n > 1 else [])
    named = {f"eval/x/score/{what}@{k}" for k in ks for what in ("best", "worst")}
    assert {k for k in metrics if "/score/" in k} == named | {f"eval/x/score/{what}@{n}" for what in ("mean", "std")}
    assert metrics == pytest.approx(wanted(batch, "1/x", False), rel=1e-9, abs=1e-9)
