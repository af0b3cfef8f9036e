"""Generator of logs for tests and benchmarks of readers, from a simulated run.

The simulation uses the real decisions and the real fold. It has train batches one after the other with an occasional
eval; runners whose attempts take time, fail, time out and are repeated; a runner that dies and comes back; tasks that
are dropped because a batch has enough; stalls; a trainer that trains and publishes weights while the next batch runs.
Time and chance are simulated: equal arguments give equal events and payloads.

`python -m benchmarks.sample_log URL --events 1000000 [--no-payloads] [--hostile] [--end finished|alive|dead]`
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from benchmarks.sample_run import COMMIT, EVAL_EVERY, HOSTILE, WORDS, Entry, RunnerModel, SimulatedRun, TimedLog
from trinity_es.actors.coordinator.decisions import batch_decisions as decisions
from trinity_es.actors.message_sizes import shorten_error
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.processes import process_start_time
from trinity_es.events.store.payloads.experiences import write_delivered
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import BatchId, FailureKind, Task, batch_stream, task_to_dict
from trinity_es.projections.batch import BatchState, batch_result, evolve
from trinity_es.projections.metric_aggregation import aggregate_run
from trinity_es.projections.tables.read_models import projectors


@dataclass(slots=True)
class _Batch:
    batch_id: BatchId
    state: BatchState
    entries: list[Entry]
    rewards: list[list[float]]
    """Rewards by task and run."""
    lengths: list[list[int]]
    tasks: list[dict[str, Any]]
    done: list[Entry] = field(default_factory=list)
    """Entries with RunsFinished, whose payloads are filled in at the end."""
    then: Callable[[], None] | None = None


def make(
    url: str, *, batches: int, tasks: int, runs: int = 2, seed: int = 0, payloads: bool = True, alive: bool = False,
    dead: bool = False, hostile: bool = False, keep: int | None = None, progress: Callable[[int], None] | None = None,
    events: int | None = None,
) -> None:
    """Write the new log of a run with `batches` train batches of `tasks` tasks of `runs` runs.

    `alive` and `dead` leave the last batch half done, in a run of this process or of processes that are gone. `keep`:
    number of the last batches whose payloads are kept; the log says that the others were freed. `events`: stop after
    the batch that reaches this number, regardless of `batches`. `hostile`: use `HOSTILE` for all external texts.
    Without `payloads` the log says that all payloads were freed.
    """
    store = open_payloads(url, durability="process") if payloads else None
    with TimedLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", _owner(alive))
        model = _Model(log, lease, store, seed, batches, tasks, runs, hostile, alive, progress)
        model.begin()
        number = 0
        while number < batches and (events is None or model.made < events):
            number += 1
            last = number == batches or (events is not None and model.made + model.per_batch >= events)
            left = batches - number if events is None else (events - model.made) // max(1, model.per_batch)
            model.keeping = payloads and (keep is None or left < keep)
            cut = last and (alive or dead)
            model.batch(number, cut=cut)
            if cut:
                break
        model.end(alive, dead)
        if not (alive or dead):
            log.release_lease(model.lease)
    if store is not None:
        store.close()


def _owner(alive: bool) -> dict[str, Any]:
    """Return the lease's owner: this process if the run is `alive`, else a process that has ended."""
    pid, started = (os.getpid(), process_start_time(os.getpid())) if alive else (2**22 - 3, "0@of/another")
    return {"pid": pid, "host": socket.gethostname(), "admin": {"pid": pid, "started": started}}


class _Model(SimulatedRun):
    """Simulated run with its batches: submit, dispatch, attempts, finalize."""

    open: _Batch | None = None

    def kill(self, runner: RunnerModel) -> None:
        """Let a runner die with its units, and start it again later. Sometimes its engine fails first."""
        if not runner.up:
            return
        reason = self.hostile_or("its process ended with signal 9")
        runner.up = False
        if self.chance.random() < 0.2:
            self.tell_runner(runner, ev.RunnerFailed, reason="EngineDeadError: the engine core is gone")
        self.tell_runner(runner, ev.RunnerLost, reason=reason)
        if self.open is not None:
            for event in decisions.lose_runner(self.open.state, runner.name, runner.incarnation, reason):
                self.record(self.open, event)
            self.check(self.open)
        self.at(1.0, lambda: self.start(runner))
        self.dispatch()

    # --- batches ----------------------------------------------------------------------------------------------------
    def batch(self, number: int, cut: bool = False) -> None:
        """Play one train batch, and an eval after it if one is due. `cut`: stop when half of the tasks are done."""
        before = self.made
        if self.chance.random() < 0.01 and not self.alive:
            self.change_coordinator()
        self.submit(number, "train", self.tasks, self.runs)
        if self.chance.random() < 0.1:
            victim = self.chance.choice(self.runners)
            self.at(self.chance.uniform(0.5, 6.0), lambda: self.kill(victim))
        if cut:
            half = max(1, self.tasks // 2)
            self.run_until(lambda: self.open is None or len(self.open.state.statuses) >= half)
            if self.open is not None:
                self._fill(self.open)
            return
        self.run_until(lambda: self.open is None)
        self.train(number)
        if number % EVAL_EVERY == 0:
            name: BatchId = f"{number}/{HOSTILE[0] if self.hostile else 'letters'}"
            self.submit(name, "eval", max(1, self.tasks // 4), self.runs)
            self.run_until(lambda: self.open is None)
        if number % 25 == 8:
            self._abort(f"{number}-spare")
        self.per_batch = self.made - before
        if len(self.entries) > COMMIT and not self.alive:
            self.flush()

    def _abort(self, batch_id: BatchId) -> None:
        """Play a batch that is aborted when some of its tasks are done."""
        self.submit(batch_id, "train", max(2, self.tasks // 8), self.runs)
        batch = self.open
        assert batch is not None
        self.run_until(lambda: bool(batch.state.statuses))
        if self.open is batch:
            self._fill(batch)
            self._revoke(batch)
            self.open = None
            for event in decisions.abort(batch.state, reason=self.hostile_or("not wanted"), keep_partial_results=False):
                self.record(batch, event)

    def submit(self, batch_id: BatchId, batch_type: Literal["train", "eval"], tasks: int, runs: int) -> None:
        chance, skill = self.chance, 1 - math.exp(-(self.trained + 5) / 200)
        chosen, rewards, lengths = [], [], []
        for _ in range(tasks):
            words = [self.hostile_or(chance.choice(WORDS)) for _ in range(2)]
            chosen.append(task_to_dict(Task(
                workflow="simple_workflow", raw_task={"question": f"Spell backwards: {' '.join(words)}",
                                                      "answer": " ".join(words)[::-1]},
                format_args={"prompt_key": "question", "response_key": "answer"},
                rollout_args={"temperature": 1.0, "max_tokens": 64}, repeat_times=runs,
                index={"taskset": HOSTILE[0] if self.hostile else "letters", "index": self.read_tasks % 5000},
            )))
            self.read_tasks += 1
            hard = chance.gauss(0.0, 0.15)
            rewards.append([round(min(1.0, max(0.0, chance.gauss(skill + hard, 0.2))), 3) for _ in range(runs)])
            lengths.append([1 + min(63, int(chance.lognormvariate(2.6, 0.5))) for _ in range(runs)])
        spare = max(1, tasks // 16) if batch_type == "train" and tasks > 3 and self.read_tasks % 3 else 0
        submitted = ev.BatchSubmitted(
            batch_id=batch_id, batch_type=batch_type, repeat_times=[runs] * tasks, tasks=chosen, max_attempts=3,
            min_wait_num=tasks - spare if spare else None, submission=f"submit-{batch_id}"[:60],
        )
        entry = self.tell(batch_stream(batch_id), submitted)
        self.open = _Batch(batch_id, evolve(None, submitted), [entry], rewards, lengths, chosen)
        if batch_type == "train":
            name = HOSTILE[0] if self.hostile else "letters"
            self.tell(f"taskset/{name}", ev.TasksetAdvanced(
                taskset=name, batch_id=batch_id, epoch=self.read_tasks // 5000, offset=self.read_tasks % 5000))
        self.dispatch()

    def record(self, batch: _Batch, event: ev.Event) -> Entry:
        entry = self.tell(batch_stream(batch.batch_id), event)
        batch.state = evolve(batch.state, event)
        batch.entries.append(entry)
        return entry

    def dispatch(self) -> None:
        """Assign waiting units to free places, first of the runner with the most."""
        batch = self.open
        if batch is None or batch.state.state.ended:
            return
        sent: dict[str, list[ev.Unit]] = {}
        up = {r.name: r for r in self.runners if r.up}
        for key, unit in batch.state.pending.items():
            free = [r for r in up.values() if r.free > 0]
            if not free:
                break
            runner = max(free, key=lambda r: (r.name != batch.state.avoid.get(key), r.free))
            runner.free -= 1
            sent.setdefault(runner.name, []).append(unit)
        for name, units in sent.items():
            runner = up[name]
            self.record(batch, ev.TasksDispatched(
                runner=name, incarnation=runner.incarnation, units=units, model_version=runner.version))
            for unit in units:
                self.attempt(batch, runner, unit)

    def attempt(self, batch: _Batch, runner: RunnerModel, unit: ev.Unit) -> None:
        life, version, chance = runner.incarnation, runner.version, self.chance
        seconds = 0.3 + max(batch.lengths[unit.task]) * 0.06 * runner.speed * chance.uniform(0.8, 1.3)
        luck = chance.random()
        kind: FailureKind | None = None
        if luck < 0.028:
            kind = "workflow" if luck < 0.02 else "timeout" if luck < 0.025 else "infra"
        if unit.task == 0 and luck < 0.1:
            seconds, kind = 60.0, "timeout"
        if luck > 0.9995:
            kind = "data"
        if kind == "timeout":
            seconds = 60.0
        seconds = round(seconds, 4)

        def over() -> None:
            if self.open is not batch or not runner.up or runner.incarnation != life:
                return  # the unit was revoked, or ended with its runner
            runner.free += 1
            strikes = batch.state.flights[unit.task, unit.run_id_base].strikes
            if kind is None:
                self._finished(batch, runner, unit, version, seconds)
            else:
                told = {"workflow": "ValueError: no number in the answer", "timeout": "60 s are over",
                           "infra": "the engine refused the request", "data": "KeyError: 'question'"}[str(kind)]
                runs = list(range(unit.run_id_base, unit.run_id_base + unit.runs))
                retry = kind != "data" and strikes + 1 < batch.state.max_attempts
                self.record(batch, ev.AttemptFailed(
                    task=unit.task, run_id_base=unit.run_id_base, failed_runs=runs, attempt=unit.attempt,
                    runner=runner.name, incarnation=life, kind=kind, message=self.hostile_or(told), retry=retry,
                    seconds=seconds,
                ))
            self.check(batch)
            self.dispatch()

        self.at(seconds, over)
        if seconds == 60.0:
            self.at(45.0, lambda: self._stalled(batch, unit, runner.name))

    def _stalled(self, batch: _Batch, unit: ev.Unit, name: str) -> None:
        if self.open is batch and not batch.state.pending and len(batch.state.flights) < 3:
            waiting = f"task {unit.task}, attempt {unit.attempt} on {name}, has run for 45.0 s"
            self.record(batch, ev.StallDetected(waiting_on=waiting, since=round(self.now - 40.0, 3)))

    def _finished(self, batch: _Batch, runner: RunnerModel, unit: ev.Unit, version: int, seconds: float) -> None:
        results = []
        for run in range(unit.run_id_base, unit.run_id_base + unit.runs):
            length = batch.lengths[unit.task][run]
            metrics = aggregate_run([{"reward": batch.rewards[unit.task][run], "response_length": float(length)}])
            metrics["time/run_execution"] = seconds
            results.append(ev.RunResult(run=run, metrics=metrics, experiences=1, prompt_tokens=16 + unit.task % 7,
                                        response_tokens=length))
        is_eval = batch.state.batch_type == "eval"
        event = ev.TaskFinished(
            task=unit.task, run_id_base=unit.run_id_base, attempt=unit.attempt, runner=runner.name,
            incarnation=runner.incarnation, runs=results, model_version=version, model_version_end=runner.version,
            payload=None if is_eval else ev.PayloadRef(digest="", first=0, count=unit.runs), seconds=seconds,
        )
        batch.done.append(self.record(batch, event))

    def check(self, batch: _Batch) -> None:
        """Finalize the batch if it has enough tasks."""
        if self.open is not batch or not batch.state.has_enough:
            return
        self._revoke(batch)
        for event in decisions.start_finalizing(batch.state):
            self.record(batch, event)
        self.open = None
        if batch.state.batch_type == "eval":
            return
        if self.chance.random() < 0.02:
            self.now += 0.2
            error = self.hostile_or("PipelineError: operator reward_filter raised ZeroDivisionError: division by zero")
            for event in (ev.FinalizeFailed(error=shorten_error(error)), ev.BatchFinalizing()):
                self.now += 2.0
                self.record(batch, event)
        delivered, refs, dropped = self._fill(batch)
        self.now += 0.05 + 0.001 * len(delivered)
        metrics = {
            "experience_pipeline/time/total": 0.05, "experience_pipeline/dropped_count": float(len(dropped)),
            "experience_pipeline/experience_count": float(len(delivered)),
        }
        counts = [(len(list(group)), version) for version, group in groupby(delivered)]
        by = {(HOSTILE[1] if self.hostile else "reward_filter"): dropped} if dropped else {}
        self.record(batch, ev.BatchFinalized(
            result=batch_result(batch.state, metrics), pipeline_metrics=metrics, experiences=refs,
            selected=len(delivered), dropped=len(dropped), dropped_by=by, model_versions=counts,
        ))

    def _revoke(self, batch: _Batch) -> None:
        """Revoke the units that still run, and free their places."""
        for flight in batch.state.flights.values():
            runner = next(r for r in self.runners if r.name == flight.runner)
            if runner.incarnation == flight.incarnation and runner.up:
                runner.free += 1

    # --- payloads ---------------------------------------------------------------------------------------------------
    def _fill(self, batch: _Batch) -> tuple[list[int], list[ev.PayloadRef], list[str]]:
        """Make a batch's payloads. Return versions and references of delivered experiences, and ids of filtered ones.

        A task whose runs all have the same reward is filtered, but only one in four of such tasks.
        """
        if batch.state.batch_type == "eval":
            return [], [], []
        done: list[Any] = [entry.event for entry in batch.done]
        raw = [(e.task, r.run, e.model_version, e.model_version_end) for e in done for r in e.runs]
        gone = [item for item in sorted(raw) if len(set(batch.rewards[item[0]])) == 1 and item[0] % 4 == 0]
        taken = [item for item in sorted(raw) if item not in gone and item[0] in batch.state.statuses]
        if self.store is not None and self.keeping and raw:
            made = {item[:2]: self._experience(batch, *item) for item in raw}
            data = Experience.serialize_many([made[item[:2]] for item in raw])
            digest = self.store.put(data)
            for item in taken:
                rewards = batch.rewards[item[0]]
                mean = sum(rewards) / len(rewards)
                spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
                e = made[item[:2]]
                length = len(e.tokens) - e.prompt_length
                e.advantages = e._as_vector("advantages", [(rewards[item[1]] - mean) / (spread + 1e-6)] * length)
                e.returns = e.advantages
            refs = write_delivered(self.store, [made[i[:2]] for i in taken], {digest: data})
        else:
            digest, out = (hashlib.sha256(f"{what} {batch.batch_id}".encode()).hexdigest() for what in ("raw", "out"))
            refs = [ev.PayloadRef(digest=out, first=0, count=len(taken))] if taken else []
            self.free.append(batch.batch_id)
        first = 0
        for entry, event in zip(batch.done, done, strict=True):
            entry.event = replace(event, payload=ev.PayloadRef(digest=digest, first=first, count=len(event.runs)))
            first += len(event.runs)
        return [v for _, _, v, _ in taken], refs, [self._eid(batch, task, run).uid for task, run, _, _ in gone]

    def _eid(self, batch: _Batch, task: int, run: int) -> EID:
        suffix = hashlib.sha256(f"{batch.batch_id} {task} {run}".encode()).hexdigest()[:6]
        return EID(batch=batch.batch_id, task=task, run=run, suffix=suffix)

    def _experience(self, batch: _Batch, task: int, run: int, version: int, version_end: int) -> Experience:
        question, answer = (batch.tasks[task]["raw_task"][key] for key in ("question", "answer"))
        length, ink = batch.lengths[task][run], self.ink
        answer = (answer * (1 + length // len(answer)))[:length]
        if self.hostile and run == 0:
            answer = HOSTILE[task % len(HOSTILE)]
            if batch.batch_id == 1 and task == 1:
                answer = (answer * 1_000_000)[:1_000_000]
        prompt = list(question.encode())[:200]
        tokens = [256 + b for b in prompt] if self.hostile else prompt[:]
        tokens += [ink.randrange(128, 256) if self.hostile else ord(answer[i % len(answer)]) for i in range(length)]
        return Experience(
            eid=self._eid(batch, task, run), tokens=tokens, prompt_length=len(prompt),
            logprobs=[-ink.expovariate(4.0) for _ in range(length)], reward=batch.rewards[task][run],
            action_mask=[True] * (length - 1) + [run % 2 == 0], prompt_text=question, response_text=answer,
            messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            info={"model_version": version, "model_version_drift": version_end - version, "task_index": task,
                  "use_count": 0},
            metrics={"response_length": float(length)},
        )

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="database URL or path of the new log")
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=64, help="tasks of a train batch")
    parser.add_argument("--runs", type=int, default=2, help="runs of a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, default=50, help="the last batches whose payloads are kept")
    parser.add_argument("--no-payloads", action="store_true")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--end", choices=["finished", "alive", "dead"], default="finished")
    options = parser.parse_args()
    started = time.monotonic()

    def progress(written: int) -> None:
        rate = written / (time.monotonic() - started)
        print(f"\r  {written:,} events, {rate:,.0f} a second ", end="", file=sys.stderr, flush=True)

    make(
        options.url, batches=10**9, tasks=options.tasks, runs=options.runs, seed=options.seed, events=options.events,
        payloads=not options.no_payloads, alive=options.end == "alive", dead=options.end == "dead",
        hostile=options.hostile, keep=options.keep, progress=progress,
    )
    print(file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
