"""Replay of recorded batches in virtual time: a clock that jumps from event to event.

Dispatching, retries, finalizing and dropping are decided by the same functions as in a run
(`coordinator.decisions.batch_decisions`, `coordinator.fleet.dynamic_timeout`, `coordinator.fleet.dispatcher.ahead`) on
the same state (`projections.batch`). Runners, trainer and network behave as in the record
(`trinity_es.audit.whatif.recorded_durations`).

- An attempt takes its recorded time, cut at the timeout. If it is not recorded (its task was dropped, or it is an extra
  attempt), its time is drawn from the recorded ones of its batch; if it was cut off, from those that took longer.
- An attempt that timed out also times out under a longer timeout, since its real end is unknown.
- Submissions of batches, publications of weights and deaths of runners keep their recorded delay from the event that
  they followed: the last end of a batch, train step or weights update before them. A train step takes its recorded
  time. So faster rollouts speed up a run that waits for its rollouts, but not one that waits for its trainer.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trinity_es.actors.coordinator.decisions import batch_decisions as decisions
from trinity_es.actors.coordinator.fleet import dynamic_timeout
from trinity_es.actors.coordinator.fleet.dispatcher import ahead
from trinity_es.actors.messages import UnitOutcome
from trinity_es.audit.whatif.recorded_durations import Anchor, Duration, History, PastBatch, WeightsUpdate, combined
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.projections.batch import BatchState, evolve

__all__ = ["Settings", "Simulation"]

TOGETHER_SECONDS = 1e-5
"""Interval within which the finished units of a runner arrive in one message."""

Unit = tuple[BatchId, int, int, int]
"""(batch, task, first run, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings to simulate; None: as recorded."""

    timeout: float | None = None
    """`explorer.max_timeout` in seconds."""
    over_rollout_ratio: float | None = None
    """`explorer.over_rollout.ratio`, of train batches."""
    runners: int | None = None
    """Number of engines of the rollout model. Additional ones are like the recorded ones and never die."""
    max_concurrency: int | None = None
    """`explorer.max_concurrency`, of each runner."""
    max_retry: int | None = None
    """`explorer.max_retry_times`."""
    runs_per_unit: int | None = None
    """`explorer.max_repeat_times_per_runner`."""
    seed: int = 0
    """Seed of the random draws."""


class _Runner:
    """Places of a runner, with the units that play in them or wait."""

    def __init__(self, name: str, places: int) -> None:
        self.name, self.places = name, places
        self.incarnation, self.ready, self.loading, self.version = 0, False, 0, 0
        self.unit_seconds: float | None = None
        self.waiting: deque[tuple[Unit, float, float, UnitOutcome]] = deque()
        self.playing: set[Unit] = set()
        self.sent: list[UnitOutcome] = []


class Simulation:
    """Clock, batches and runners. Times are seconds after the first submission."""

    def __init__(self, past: History, settings: Settings) -> None:
        self.past, self.settings = past, settings
        explorer = past.config["explorer"]
        self.limit: float = explorer["max_timeout"] if settings.timeout is None else settings.timeout
        self.sequential = explorer.get("concurrent_mode") == "sequential"
        self.over = explorer["over_rollout"]
        dynamic = explorer["dynamic_timeout"]
        self.dynamic = {"ratio": dynamic["ratio"], "warmup_min_steps": dynamic["warmup_min_steps"],
                        "max_timeout": self.limit} if dynamic["enable"] else None
        self.pace = past.pace
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.begun = past.batches[0].submitted_at
        self.at: dict[Anchor, float] = {}
        """Virtual time of each anchor reached so far."""
        self.waits: dict[Anchor, list[Callable[[], None]]] = {}
        self.records = {b.batch_id: b for b in past.batches}
        self.states: dict[BatchId, BatchState] = {}
        self.asked: set[BatchId] = set()
        self.grace_over: set[BatchId] = set()
        self.grace_runs: set[BatchId] = set()
        self.attempts: dict[BatchId, int] = {}
        self.drawn: dict[BatchId, int] = {}
        self.runners: dict[str, _Runner] = {}
        self.pools: dict[tuple[BatchId, bool], list[Duration]] = {}
        self.usual_rests: dict[BatchId, tuple[float, float]] = {}

    # --- the clock --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        self._plan_runners()
        for batch in self.past.batches:
            self._plan_batch(batch)
        for change in self.past.changes:
            self._plan_weights(change)
        self.reach(("begin", None))
        while self.queue:
            self.now, _, call = heapq.heappop(self.queue)
            call()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (self.now + max(0.0, seconds), self.number, call))

    def reach(self, anchor: Anchor) -> None:
        """Mark an anchor as reached and run the calls that wait for it."""
        if anchor not in self.at:
            self.at[anchor] = self.now
            for call in self.waits.pop(anchor, []):
                call()

    def when(self, anchors: Sequence[Anchor], seconds: float, call: Callable[[], None]) -> None:
        """Call `call` the given time after the last of these anchors is reached."""
        missing = {a for a in anchors if a not in self.at}

        def reached(anchor: Anchor) -> None:
            missing.discard(anchor)
            if not missing:
                self.after(seconds, call)

        if not missing:
            self.after(seconds, call)
        for anchor in list(missing):
            self.waits.setdefault(anchor, []).append(partial(reached, anchor))

    # --- events that the coordinator does not decide ----------------------------------------------------------------
    def _plan_runners(self) -> None:
        names = sorted({life.runner for life in self.past.lives}, key=lambda n: (len(n), n))
        wanted = len(names) if self.settings.runners is None else self.settings.runners
        for name in names[:wanted]:
            for life in (each for each in self.past.lives if each.runner == name):
                self._plan_life(name, life.incarnation, life.places, life.ready_at, life.ended_at, life.blamed)
        places = max((life.places for life in self.past.lives), default=self.past.config["explorer"]["max_concurrency"])
        for i in range(len(names), wanted):
            self._plan_life(f"further runner {i}", 1, places, self.begun, None, True)

    def _plan_life(
        self, name: str, incarnation: int, places: int, ready_at: float, ended_at: float | None, blamed: bool
    ) -> None:
        def up() -> None:
            runner = self.runners.setdefault(name, _Runner(name, places))
            runner.places = self.settings.max_concurrency or places
            runner.incarnation, runner.ready, runner.loading = incarnation, True, 0
            runner.unit_seconds = self.past.unit_seconds if ready_at <= self.begun else None
            self.dispatch()

        def down() -> None:
            runner = self.runners.get(name)
            if runner is None or runner.incarnation != incarnation:
                return
            runner.ready = False
            runner.waiting.clear()
            runner.playing.clear()
            for batch_id in [b for b, s in self.states.items() if not s.state.ended]:
                state = self.states[batch_id]
                self.record(batch_id, decisions.runner_lost(state, name, incarnation, "it died", blamed=blamed))
                self.check_finalize(batch_id)
            self.dispatch()

        if ready_at <= self.begun:
            self.when([("begin", None)], 0.0, up)
        else:
            anchor, seconds = self.past.before(ready_at)
            self.when([anchor], seconds, up)
        if ended_at is not None:
            anchor, seconds = self.past.before(ended_at)
            self.when([anchor], seconds, down)

    def _plan_batch(self, batch: PastBatch) -> None:
        anchor, seconds = self.past.before(batch.submitted_at)
        self.when([anchor], seconds, lambda: self.submit(batch))
        anchors: list[Anchor] = [("submit", batch.batch_id)]
        before = [b for b in self.past.batches if b.submitted.batch_type == batch.submitted.batch_type
                  and b.submitted_at < batch.submitted_at and b.ended_at is not None]
        # The trainer asks for batches in order, unless the record shows otherwise.
        if before and before[-1].ended_at <= (batch.finalizing_at or math.inf):  # type: ignore[operator]  # not None
            anchors.append(("end", before[-1].batch_id))
        late = 0.0
        if batch.asked_late and batch.finalizing_at is not None:
            anchor, late = self.past.before(batch.finalizing_at)
            anchors = [("submit", batch.batch_id), anchor]
            late = min(late, batch.finalizing_at - batch.submitted_at)
        self.when(anchors, late, lambda: self.ask(batch.batch_id))
        assert batch.state is not None
        if batch.state.state is BatchLifecycleState.ABORTED and batch.ended_at is not None:
            anchor, seconds = self.past.before(batch.ended_at)
            self.when([("submit", batch.batch_id), anchor], seconds, lambda: self.abort(batch.batch_id))
        if batch.trained_at is not None:
            # A train step waits for its batch and for the previous step or weights update.
            done = [a for at, a in self.past.anchors if a[0] in ("trained", "weights") and at < batch.trained_at]
            anchors = [("end", batch.batch_id), *done[-1:]]
            since = max(at for at, a in self.past.anchors if a in anchors)
            self.when(anchors, batch.trained_at - since, lambda: self.reach(("trained", batch.batch_id)))

    def _plan_weights(self, change: WeightsUpdate) -> None:
        anchor, seconds = self.past.before(change.published_at)
        usual = sorted(change.loads.values())[len(change.loads) // 2] if change.loads else 0.0

        def published() -> None:
            longest = 0.0
            for runner in self.runners.values():
                if runner.ready:
                    took = change.loads.get(runner.name, usual)
                    longest = max(longest, took)
                    runner.loading += 1
                    self.after(took, partial(loaded, runner, runner.incarnation))
            self.after(longest, lambda: self.reach(("weights", change.version)))

        def loaded(runner: _Runner, incarnation: int) -> None:
            if runner.incarnation == incarnation and runner.loading:
                runner.loading -= 1
                runner.version = change.version
                self.dispatch()

        self.when([anchor], seconds, published)

    # --- the coordinator --------------------------------------------------------------------------------------------
    def record(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        for event in events:
            self.states[batch_id] = evolve(self.states.get(batch_id), event)

    def submit(self, batch: PastBatch) -> None:
        recorded, settings = batch.submitted, self.settings
        wait = recorded.min_wait_num
        if settings.over_rollout_ratio is not None and recorded.batch_type == "train":
            share = 1 - settings.over_rollout_ratio
            wait = None if share == 1 else math.ceil(round(len(recorded.repeat_times) * share, 9))
        submitted = replace(
            recorded, tasks=None, tasks_digest=None, min_wait_num=wait,
            max_attempts=recorded.max_attempts if settings.max_retry is None else 1 + settings.max_retry,
            runs_per_unit=recorded.runs_per_unit if settings.runs_per_unit is None else settings.runs_per_unit,
        )
        self.record(batch.batch_id, [submitted])
        self.reach(("submit", batch.batch_id))
        self.dispatch()

    def ask(self, batch_id: BatchId) -> None:
        self.asked.add(batch_id)
        self.check_finalize(batch_id)
        self.dispatch()

    def abort(self, batch_id: BatchId) -> None:
        state = self.states[batch_id]
        if state.state.ended:
            return
        self.revoke(state)
        self.record(batch_id, decisions.abort(state, reason="as recorded", keep_partial_results=True))
        self.reach(("end", batch_id))
        self.dispatch()

    def check_finalize(self, batch_id: BatchId) -> None:
        """Finalize the batch if it has enough, as the coordinator does."""
        state = self.states[batch_id]
        if batch_id not in self.asked or state.state not in (BatchLifecycleState.RUNNING, BatchLifecycleState.PENDING):
            return
        if not state.has_enough:
            return
        grace = self.over["wait_after_min"]
        if not state.is_complete and grace > 0 and batch_id not in self.grace_over:
            if batch_id not in self.grace_runs:
                self.grace_runs.add(batch_id)
                self.after(grace + self.records[batch_id].timer_late, lambda: self._grace(batch_id))
            return
        self.revoke(state)
        self.record(
            batch_id, decisions.start_finalizing(state, return_partial=self.over["return_partial_tasks"]))
        if self.states[batch_id].state.ended:
            self.ended(batch_id)
        else:
            was = self.records[batch_id]
            took = 0.0 if was.ended_at is None or was.finalizing_at is None else was.ended_at - was.finalizing_at
            self.after(took, lambda: self._through_pipeline(batch_id))

    def _grace(self, batch_id: BatchId) -> None:
        self.grace_over.add(batch_id)
        self.check_finalize(batch_id)
        self.dispatch()

    def _through_pipeline(self, batch_id: BatchId) -> None:
        if self.states[batch_id].state is BatchLifecycleState.FINALIZING:
            self.record(batch_id, [ev.BatchFinalized(result={})])
            self.ended(batch_id)
            self.dispatch()

    def ended(self, batch_id: BatchId) -> None:
        if self.dynamic is not None:
            self.pace = dynamic_timeout.measured(self.pace, self.states[batch_id], **self.dynamic) or self.pace
        self.reach(("end", batch_id))

    def timeout(self) -> float:
        if self.dynamic is None or self.pace is None:
            return 0.0
        pace = self.pace
        return dynamic_timeout.attempt_timeout(pace.steps, pace.attempts, pace.seconds, **self.dynamic)

    def dispatch(self) -> None:
        batches = [s for s in self.states.values() if not s.state.ended]
        if not any(s.pending for s in batches):
            return
        load = Counter((f.runner, f.incarnation) for s in batches for f in s.flights.values())
        capacities = [
            decisions.Capacity(
                name=r.name, incarnation=r.incarnation, model_version=r.version, places=r.places,
                load=load[r.name, r.incarnation], limit=r.places + ahead(r.places, r.unit_seconds),
            )
            for r in self.runners.values() if r.ready and not r.loading
        ]
        for state, event in decisions.dispatch(batches, capacities, self.timeout()):
            self.record(state.batch_id, [event])
            self.attempts[state.batch_id] = self.attempts.get(state.batch_id, 0) + len(event.units)
            for unit in event.units:
                self._begin(self.runners[event.runner], state, unit, event.timeout or self.limit)

    def revoke(self, state: BatchState) -> None:
        """Remove the units of this batch from all runners."""
        for runner in self.runners.values():
            runner.waiting = deque(w for w in runner.waiting if w[0][0] != state.batch_id)
            runner.playing -= {u for u in runner.playing if u[0] == state.batch_id}
            self._fill(runner)

    # --- runners ----------------------------------------------------------------------------------------------------
    def _begin(self, runner: _Runner, state: BatchState, unit: ev.Unit, limit: float) -> None:
        seconds, rest, outcome = self._play(state, unit, limit)
        runner.waiting.append(((state.batch_id, unit.task, unit.run_id_base, unit.attempt), seconds, rest, outcome))
        self._fill(runner)

    def _fill(self, runner: _Runner) -> None:
        while runner.ready and runner.waiting and len(runner.playing) < runner.places:
            unit, seconds, rest, outcome = runner.waiting.popleft()
            runner.playing.add(unit)
            self.after(seconds, partial(self._end_unit, runner, runner.incarnation, unit, rest, outcome))

    def _end_unit(self, runner: _Runner, life: int, unit: Unit, rest: float, outcome: UnitOutcome) -> None:
        """Free the place of a unit and send its outcome."""
        if runner.incarnation != life or unit not in runner.playing:
            return  # it was revoked, or its runner died
        runner.playing.discard(unit)
        self._fill(runner)
        self.after(rest, lambda: self._send(runner, life, outcome))

    def _send(self, runner: _Runner, life: int, outcome: UnitOutcome) -> None:
        """Send an outcome; those sent at the same time arrive in one message and one turn of the coordinator."""
        if not runner.sent:
            self.after(TOGETHER_SECONDS, lambda: self._arrived(runner, life))
        runner.sent.append(outcome)

    def _arrived(self, runner: _Runner, life: int) -> None:
        touched: dict[BatchId, None] = {}
        outcomes, runner.sent = runner.sent, []
        for outcome in outcomes:
            events = decisions.outcome(self.states[outcome.batch_id], runner.name, life, outcome)
            self.record(outcome.batch_id, events)
            before = runner.unit_seconds
            runner.unit_seconds = outcome.seconds if before is None else 0.8 * before + 0.2 * outcome.seconds
            if events:
                touched[outcome.batch_id] = None
        for batch_id in touched:
            self.check_finalize(batch_id)
        self.dispatch()

    # --- durations --------------------------------------------------------------------------------------------------
    def _play(self, state: BatchState, unit: ev.Unit, limit: float) -> tuple[float, float, UnitOutcome]:
        """Return (seconds in its place, seconds from there into the log, outcome)."""
        past = self.records[state.batch_id]
        runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
        each = [self._duration_of(past, unit.task, run, unit.attempt, limit) for run in runs]
        inside, rest = past.rest.get((unit.task, unit.run_id_base, unit.attempt)) or self._usual_rest(past)
        seconds = combined([t.seconds for t in each], sequential=self.sequential) + inside
        outcome = UnitOutcome(batch_id=state.batch_id, submission=state.submission, unit=unit, seconds=seconds)
        for run, took in zip(runs, each, strict=True):
            if took.kind:
                outcome.failures.append((run, took.kind, took.kind))  # type: ignore[arg-type]  # a FailureKind
            else:
                outcome.results.append(ev.RunResult(run=run, metrics={}))
        return seconds, rest, outcome

    def _duration_of(self, past: PastBatch, task: int, run: int, attempt: int, limit: float) -> Duration:
        took = past.took.get((task, run, attempt))
        if took is None or took.cut:
            self.drawn[past.batch_id] = self.drawn.get(past.batch_id, 0) + 1
            chance = random.Random(f"{self.settings.seed}/{past.batch_id}/{task}/{run}/{attempt}")
            took = self._draw(self._pool(past, attempt > 1), chance, took)
        if took.kind == "timeout":
            return replace(took, seconds=max(0.0, limit + took.seconds - took.limit))
        if took.limit != limit and took.seconds > limit:
            return replace(took, seconds=limit, kind="timeout")
        return took

    def _usual_rest(self, past: PastBatch) -> tuple[float, float]:
        if past.batch_id not in self.usual_rests:
            self.usual_rests[past.batch_id] = past.usual_rest()
        return self.usual_rests[past.batch_id]

    @staticmethod
    def _draw(pool: Sequence[Duration], chance: random.Random, cut: Duration | None) -> Duration:
        """Draw a duration from the pool. For an attempt that was cut off, the result is longer than the cut."""
        if not pool:
            return Duration(seconds=0.0 if cut is None else cut.seconds)
        if cut is None:
            return chance.choice(pool)
        longer = [t for t in pool if t.seconds > cut.seconds]
        if longer:
            return chance.choice(longer)
        extra = chance.choice(pool)
        return replace(extra, seconds=cut.seconds + extra.seconds, limit=0.0, kind="")

    def _pool(self, past: PastBatch, retry: bool) -> list[Duration]:
        """Return the recorded durations to draw from, for a first attempt or a retry of this batch."""
        if (past.batch_id, retry) not in self.pools:
            first = [t for (_, _, n), t in sorted(past.took.items()) if not t.cut and n == 1]
            later = [t for (_, _, n), t in sorted(past.took.items()) if not t.cut and n > 1]
            others = [t for b in self.past.batches if b.submitted.batch_type == past.submitted.batch_type
                      for _, t in sorted(b.took.items()) if not t.cut]
            self.pools[past.batch_id, retry] = (later or first if retry else first) or later or others
        return self.pools[past.batch_id, retry]
