"""Discrete-event simulation that replays recorded batches under other settings.

The coordinator's own functions decide on dispatching, retries, finalizing and dropping (in `coordinator`:
`decisions.batch_decisions`, `fleet.dynamic_timeout`, `fleet.dispatcher.units_ahead`), on the same state
(`projections.batch`). Runners, trainer and network behave as recorded
(`trinity_es.audit.whatif.recorded_durations`).

- An attempt takes its recorded time, at most the timeout. If it is not recorded (its task was dropped, or it is an
  extra attempt), a recorded time of its batch is drawn. If an abort or a death ended it early, a longer one is.
- An attempt that its timeout ended times out under a longer timeout, too, since its real end is unknown.
- Submissions of batches, publications of weights and deaths of runners keep their recorded delay from the event that
  they followed: the last end of a batch, train step or weights update before them. A train step takes its recorded
  time. So faster rollouts speed up a run that waits for its rollouts, but not a run that waits for its trainer.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from trinity_es.actors.coordinator.decisions import batch_decisions as decisions
from trinity_es.actors.coordinator.fleet import dynamic_timeout
from trinity_es.actors.coordinator.fleet.dispatcher import units_ahead
from trinity_es.actors.messages import UnitOutcome
from trinity_es.audit.whatif.history import Anchor, Duration, History, Life, PastBatch, Settings, WeightsUpdate
from trinity_es.audit.whatif.recorded_durations import combine_seconds
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.projections.batch import BatchState, evolve

__all__ = ["Simulation"]

TOGETHER_SECONDS = 1e-5
"""Units that a runner finishes within this interval arrive in one message."""

Unit = tuple[BatchId, int, int, int]
"""(batch, task, first run, attempt)."""


class _Runner:
    """Simulated runner. It plays at most `places` units at a time; the others wait."""

    def __init__(self, name: str, places: int) -> None:
        self.name, self.places = name, places
        self.incarnation, self.is_ready, self.version = 0, False, 0
        self.loads_in_progress = 0
        """Number of weights versions that the runner loads now; it gets no units meanwhile."""
        self.unit_seconds: float | None = None
        self.waiting: deque[tuple[Unit, float, float, UnitOutcome]] = deque()
        self.playing: set[Unit] = set()
        self.outcomes: list[UnitOutcome] = []
        """Outcomes on their way to the coordinator."""


class Simulation:
    """Replay of a recorded history with its own clock. Virtual times are seconds after the first submission."""

    def __init__(self, past: History, settings: Settings) -> None:
        self.past, self.settings = past, settings
        explorer = past.config["explorer"]
        self.time_limit: float = explorer["max_timeout"] if settings.timeout is None else settings.timeout
        self.is_sequential = explorer.get("concurrent_mode") == "sequential"
        self.over_rollout = explorer["over_rollout"]
        dynamic = explorer["dynamic_timeout"]
        self.dynamic_timeout = {"ratio": dynamic["ratio"], "warmup_min_steps": dynamic["warmup_min_steps"],
                                "max_timeout": self.time_limit} if dynamic["enable"] else None
        self.pace = past.pace
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        """Heap of (time, number, call). Calls at the same time run in the order of their numbers."""
        self.call_numbers = count()
        self.begun_at = past.batches[0].submitted_at
        self.reached_at: dict[Anchor, float] = {}
        """Virtual time of each anchor reached so far."""
        self.waiting_calls: dict[Anchor, list[Callable[[], None]]] = {}
        self.past_batches = {b.batch_id: b for b in past.batches}
        self.states: dict[BatchId, BatchState] = {}
        self.additions = {b.batch_id: deque(a for a in b.additions if a.missing is not None) for b in past.batches}
        """Tasks that the client will add to each batch. It adds some whenever the pipeline has left too few groups."""
        self.awaited_ids: set[BatchId] = set()
        """Batches that a caller waits to finalize."""
        self.grace_begun_ids: set[BatchId] = set()
        """Batches whose extra wait `over_rollout.wait_after_min` has begun; in `grace_over_ids` it is over."""
        self.grace_over_ids: set[BatchId] = set()
        self.attempts: Counter[BatchId] = Counter()
        self.drawn_counts: Counter[BatchId] = Counter()
        self.runners: dict[str, _Runner] = {}
        self.duration_pools: dict[tuple[BatchId, bool], list[Duration]] = {}

    # --- the clock --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Schedule the recorded events, then run scheduled calls until none is left."""
        self._plan_runners()
        for batch in self.past.batches:
            self._plan_batch(batch)
        for update in self.past.updates:
            self._plan_weights(update)
        self.reach_anchor(("begin", None))
        while self.queue:
            self.now, _, call = heapq.heappop(self.queue)
            call()

    def call_after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule `call` for this many virtual seconds from now."""
        heapq.heappush(self.queue, (self.now + max(0.0, seconds), next(self.call_numbers), call))

    def reach_anchor(self, anchor: Anchor) -> None:
        """Mark an anchor as reached, and run the calls that wait for it."""
        if anchor not in self.reached_at:
            self.reached_at[anchor] = self.now
            for call in self.waiting_calls.pop(anchor, []):
                call()

    def call_after_anchors(self, anchors: Sequence[Anchor], seconds: float, call: Callable[[], None]) -> None:
        """Schedule `call` for `seconds` after all these anchors are reached."""
        missing = {a for a in anchors if a not in self.reached_at}

        def note_reached(anchor: Anchor) -> None:
            missing.discard(anchor)
            if not missing:
                self.call_after(seconds, call)

        if not missing:
            self.call_after(seconds, call)
        for anchor in list(missing):
            self.waiting_calls.setdefault(anchor, []).append(partial(note_reached, anchor))

    def _call_as_recorded(self, at: float, call: Callable[[], None], *anchors: Anchor) -> None:
        """Schedule `call` with the recorded delay of time `at` from the last anchor before it, and after `anchors`."""
        anchor, delay = self.past.last_anchor_before(at)
        self.call_after_anchors([*anchors, anchor], delay, call)

    # --- events that the coordinator does not decide ----------------------------------------------------------------
    def _plan_runners(self) -> None:
        """Schedule as many runners as the settings say: the recorded ones, then additional ones that never die."""
        names = sorted({life.runner for life in self.past.lives}, key=lambda n: (len(n), n))
        wanted = len(names) if self.settings.runners is None else self.settings.runners
        for life in (life for name in names[:wanted] for life in self.past.lives if life.runner == name):
            self._plan_life(life)
        places = max((life.places for life in self.past.lives), default=self.past.config["explorer"]["max_concurrency"])
        for i in range(len(names), wanted):
            self._plan_life(Life(runner=f"further runner {i}", incarnation=1, places=places, ready_at=self.begun_at,
                                 ended_at=None))

    def _plan_life(self, life: Life) -> None:
        """Schedule the start and, if it ended, the death of one process of a runner."""
        name, incarnation = life.runner, life.incarnation

        def start() -> None:
            runner = self.runners.setdefault(name, _Runner(name, life.places))
            runner.places = self.settings.max_concurrency or life.places
            runner.incarnation, runner.is_ready, runner.loads_in_progress = incarnation, True, 0
            runner.unit_seconds = self.past.unit_seconds if life.ready_at <= self.begun_at else None
            self.dispatch()

        def die() -> None:
            runner = self.runners.get(name)
            if runner is None or runner.incarnation != incarnation:
                return
            runner.is_ready = False
            runner.waiting.clear()
            runner.playing.clear()
            for batch_id in [b for b, s in self.states.items() if not s.state.ended]:
                events = decisions.lose_runner(
                    self.states[batch_id], name, incarnation, "it died", blamed=life.is_blamed)
                self.apply_events(batch_id, events)
                self.finalize_if_enough(batch_id)
            self.dispatch()

        if life.ready_at <= self.begun_at:
            self.call_after_anchors([("begin", None)], 0.0, start)
        else:
            self._call_as_recorded(life.ready_at, start)
        if life.ended_at is not None:
            self._call_as_recorded(life.ended_at, die)

    def _plan_batch(self, batch: PastBatch) -> None:
        """Schedule a batch's recorded submission, the request to finalize it, its abort and its train step."""
        self._call_as_recorded(batch.submitted_at, lambda: self.submit(batch))
        submission: Anchor = ("submit", batch.batch_id)
        anchors = [submission]
        batches_before = [b for b in self.past.batches if b.submitted.batch_type == batch.submitted.batch_type
                          and b.submitted_at < batch.submitted_at and b.ended_at is not None]
        # The trainer asks for batches in order, unless the record shows otherwise.
        if batches_before and batches_before[-1].ended_at <= (batch.finalizing_at or math.inf):  # type: ignore[operator]  # not None
            anchors.append(("end", batches_before[-1].batch_id))
        delay = 0.0
        if batch.was_requested_late and batch.finalizing_at is not None:
            anchor, delay = self.past.last_anchor_before(batch.finalizing_at)
            anchors = [submission, anchor]
            delay = min(delay, batch.finalizing_at - batch.submitted_at)
        self.call_after_anchors(anchors, delay, lambda: self.await_batch(batch.batch_id))
        assert batch.state is not None
        if batch.state.state is BatchLifecycleState.ABORTED and batch.ended_at is not None:
            self._call_as_recorded(batch.ended_at, lambda: self.abort(batch.batch_id), submission)
        for addition in (a for a in batch.additions if a.missing is None):
            add_tasks = partial(self._add_tasks, batch.batch_id, addition.event)
            self._call_as_recorded(addition.added_at, add_tasks, submission)
        if batch.trained_at is not None:
            # A train step waits for its batch and for the previous step or weights update.
            previous = [a for at, a in self.past.anchors if a[0] in ("trained", "weights") and at < batch.trained_at]
            anchors = [("end", batch.batch_id), *previous[-1:]]
            delay = batch.trained_at - max(at for at, a in self.past.anchors if a in anchors)
            self.call_after_anchors(anchors, delay, lambda: self.reach_anchor(("trained", batch.batch_id)))

    def _plan_weights(self, update: WeightsUpdate) -> None:
        """Schedule a publication of weights. A runner without a recorded load takes the median time."""
        median_seconds = sorted(update.loads.values())[len(update.loads) // 2] if update.loads else 0.0

        def publish() -> None:
            longest = 0.0
            for runner in self.runners.values():
                if runner.is_ready:
                    load_seconds = update.loads.get(runner.name, median_seconds)
                    longest = max(longest, load_seconds)
                    runner.loads_in_progress += 1
                    self.call_after(load_seconds, partial(end_load, runner, runner.incarnation))
            self.call_after(longest, lambda: self.reach_anchor(("weights", update.version)))

        def end_load(runner: _Runner, incarnation: int) -> None:
            if runner.incarnation == incarnation and runner.loads_in_progress:
                runner.loads_in_progress -= 1
                runner.version = update.version
                self.dispatch()

        self._call_as_recorded(update.published_at, publish)

    # --- the coordinator --------------------------------------------------------------------------------------------
    def apply_events(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        for event in events:
            self.states[batch_id] = evolve(self.states.get(batch_id), event)

    def submit(self, batch: PastBatch) -> None:
        original, settings = batch.submitted, self.settings
        min_wait_num = original.min_wait_num
        if settings.over_rollout_ratio is not None and original.batch_type == "train":
            share = 1 - settings.over_rollout_ratio
            min_wait_num = None if share == 1 else math.ceil(round(len(original.repeat_times) * share, 9))
        submitted = replace(
            original, tasks=None, tasks_digest=None, min_wait_num=min_wait_num,
            max_attempts=original.max_attempts if settings.max_retry is None else 1 + settings.max_retry,
            runs_per_unit=original.runs_per_unit if settings.runs_per_unit is None else settings.runs_per_unit,
        )
        self.apply_events(batch.batch_id, [submitted])
        self.reach_anchor(("submit", batch.batch_id))
        self.dispatch()

    def await_batch(self, batch_id: BatchId) -> None:
        """Note that a caller waits to finalize the batch from now on."""
        self.awaited_ids.add(batch_id)
        self.finalize_if_enough(batch_id)
        self.dispatch()

    def abort(self, batch_id: BatchId) -> None:
        state = self.states[batch_id]
        if state.state.ended:
            return
        self.revoke(state)
        self.apply_events(batch_id, decisions.abort(state, reason="as recorded", keep_partial_results=True))
        self.reach_anchor(("end", batch_id))
        self.dispatch()

    def finalize_if_enough(self, batch_id: BatchId) -> None:
        """Start to finalize the batch if a caller waits and enough tasks are settled, as the coordinator does."""
        state = self.states[batch_id]
        is_open = state.state in (BatchLifecycleState.RUNNING, BatchLifecycleState.PENDING)
        if batch_id not in self.awaited_ids or not is_open or not state.has_enough:
            return
        grace = self.over_rollout["wait_after_min"]
        if not state.is_complete and grace > 0 and batch_id not in self.grace_over_ids:
            if batch_id not in self.grace_begun_ids:
                self.grace_begun_ids.add(batch_id)
                self.call_after(grace + self.past_batches[batch_id].timer_delay, lambda: self._end_grace(batch_id))
            return
        self.revoke(state)
        return_partial = self.over_rollout["return_partial_tasks"]
        self.apply_events(batch_id, decisions.start_finalizing(state, return_partial=return_partial))
        if self.states[batch_id].state.ended:
            self.note_end(batch_id)
        else:
            additions = self.additions[batch_id]
            seconds = additions[0].pipeline_seconds if additions else self.past_batches[batch_id].pipeline_seconds
            self.call_after(seconds, lambda: self._end_pipeline(batch_id))

    def _end_grace(self, batch_id: BatchId) -> None:
        self.grace_over_ids.add(batch_id)
        self.finalize_if_enough(batch_id)
        self.dispatch()

    def _end_pipeline(self, batch_id: BatchId) -> None:
        """End the batch. If the recorded pipeline left too few groups, the client adds tasks instead."""
        if self.states[batch_id].state is not BatchLifecycleState.FINALIZING:
            return
        if additions := self.additions[batch_id]:
            addition = additions.popleft()
            self.apply_events(batch_id, [*filter(None, [addition.missing])])
            self.awaited_ids.discard(batch_id)  # until its caller has added tasks
            self.call_after(addition.pause, partial(self._add_tasks, batch_id, addition.event, then_await=True))
        else:
            self.apply_events(batch_id, [ev.BatchFinalized(result={})])
            self.note_end(batch_id)
            self.dispatch()

    def _add_tasks(self, batch_id: BatchId, event: ev.TasksAdded, *, then_await: bool = False) -> None:
        """Add the tasks of a recorded event to a running batch. `then_await`: from then on a caller waits for it."""
        if then_await:
            self.awaited_ids.add(batch_id)
        if self.states[batch_id].state is BatchLifecycleState.RUNNING:
            per_unit = self.settings.runs_per_unit or event.runs_per_unit
            self.apply_events(batch_id, [replace(event, tasks=None, tasks_digest=None, runs_per_unit=per_unit)])
            self.dispatch()

    def note_end(self, batch_id: BatchId) -> None:
        if self.dynamic_timeout is not None:
            pace = dynamic_timeout.add_measurements(self.pace, self.states[batch_id], **self.dynamic_timeout)
            self.pace = pace or self.pace
        self.reach_anchor(("end", batch_id))

    def timeout(self) -> float:
        """Return the dynamic timeout of a run in seconds; 0 if there is none."""
        if self.dynamic_timeout is None or self.pace is None:
            return 0.0
        pace = self.pace
        return dynamic_timeout.attempt_timeout(pace.steps, pace.attempts, pace.seconds, **self.dynamic_timeout)

    def dispatch(self) -> None:
        """Send waiting units to runners with free places, as the coordinator does."""
        batches = [s for s in self.states.values() if not s.state.ended]
        if not any(s.pending for s in batches):
            return
        load = Counter((f.runner, f.incarnation) for s in batches for f in s.flights.values())
        capacities = [
            decisions.Capacity(
                name=r.name, incarnation=r.incarnation, model_version=r.version, places=r.places,
                load=load[r.name, r.incarnation], limit=r.places + units_ahead(r.places, r.unit_seconds),
            )
            for r in self.runners.values() if r.is_ready and not r.loads_in_progress
        ]
        for state, event in decisions.dispatch(batches, capacities, self.timeout()):
            self.apply_events(state.batch_id, [event])
            self.attempts[state.batch_id] += len(event.units)
            runner = self.runners[event.runner]
            for unit in event.units:
                seconds, delay, outcome = self._play_unit(state, unit, event.timeout or self.time_limit)
                key = (state.batch_id, unit.task, unit.run_id_base, unit.attempt)
                runner.waiting.append((key, seconds, delay, outcome))
                self._start_waiting_units(runner)

    def revoke(self, state: BatchState) -> None:
        """Remove the units of this batch from all runners."""
        for runner in self.runners.values():
            runner.waiting = deque(w for w in runner.waiting if w[0][0] != state.batch_id)
            runner.playing -= {u for u in runner.playing if u[0] == state.batch_id}
            self._start_waiting_units(runner)

    # --- runners ----------------------------------------------------------------------------------------------------
    def _start_waiting_units(self, runner: _Runner) -> None:
        while runner.is_ready and runner.waiting and len(runner.playing) < runner.places:
            unit, seconds, delay, outcome = runner.waiting.popleft()
            runner.playing.add(unit)
            self.call_after(seconds, partial(self._end_unit, runner, runner.incarnation, unit, delay, outcome))

    def _end_unit(self, runner: _Runner, incarnation: int, unit: Unit, delay: float, outcome: UnitOutcome) -> None:
        """Free the unit's place, and send its outcome after `delay` seconds."""
        if runner.incarnation != incarnation or unit not in runner.playing:
            return  # the unit was revoked, or its runner died
        runner.playing.discard(unit)
        self._start_waiting_units(runner)

        def send_outcome() -> None:
            if not runner.outcomes:
                self.call_after(TOGETHER_SECONDS, lambda: self._receive_outcomes(runner, incarnation))
            runner.outcomes.append(outcome)

        self.call_after(delay, send_outcome)

    def _receive_outcomes(self, runner: _Runner, incarnation: int) -> None:
        """Record the outcomes of a runner, as the coordinator does, and finalize batches that have enough."""
        changed_ids: dict[BatchId, None] = {}  # an ordered set
        outcomes, runner.outcomes = runner.outcomes, []
        for outcome in outcomes:
            events = decisions.apply_outcome(self.states[outcome.batch_id], runner.name, incarnation, outcome)
            self.apply_events(outcome.batch_id, events)
            average = runner.unit_seconds
            runner.unit_seconds = outcome.seconds if average is None else 0.8 * average + 0.2 * outcome.seconds
            if events:
                changed_ids[outcome.batch_id] = None
        for batch_id in changed_ids:
            self.finalize_if_enough(batch_id)
        self.dispatch()

    # --- durations --------------------------------------------------------------------------------------------------
    def _play_unit(self, state: BatchState, unit: ev.Unit, limit: float) -> tuple[float, float, UnitOutcome]:
        """Return a unit's seconds on its runner, further seconds until its outcome is in the log, and the outcome."""
        past = self.past_batches[state.batch_id]
        runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
        durations = [self._duration_of(past, unit.task, run, unit.attempt, limit) for run in runs]
        overhead, delay = past.overheads.get((unit.task, unit.run_id_base, unit.attempt)) or past.usual_overheads
        seconds = combine_seconds([d.seconds for d in durations], sequential=self.is_sequential) + overhead
        outcome = UnitOutcome(batch_id=state.batch_id, submission=state.submission, unit=unit, seconds=seconds)
        for run, duration in zip(runs, durations, strict=True):
            if duration.kind:
                outcome.failures.append((run, duration.kind, duration.kind))  # type: ignore[arg-type]  # a FailureKind
            else:
                outcome.results.append(ev.RunResult(run=run, metrics={}))
        return seconds, delay, outcome

    def _duration_of(self, past: PastBatch, task: int, run: int, attempt: int, limit: float) -> Duration:
        """Return the duration of a run, recorded or else drawn, and cut at the time limit."""
        duration = past.durations.get((task, run, attempt))
        if duration is None or duration.cut:
            self.drawn_counts[past.batch_id] += 1
            chance = random.Random(f"{self.settings.seed}/{past.batch_id}/{task}/{run}/{attempt}")
            duration = self._draw_duration(self._duration_pool(past, attempt > 1), chance, duration)
        if duration.kind == "timeout":
            return replace(duration, seconds=max(0.0, limit + duration.seconds - duration.limit))
        if duration.limit != limit and duration.seconds > limit:
            return replace(duration, seconds=limit, kind="timeout")
        return duration

    @staticmethod
    def _draw_duration(pool: Sequence[Duration], chance: random.Random, cut: Duration | None) -> Duration:
        """Draw a duration from the pool; for an attempt that was cut off, a longer one than its recorded time."""
        if not pool:
            return Duration(seconds=0.0 if cut is None else cut.seconds)
        if cut is None:
            return chance.choice(pool)
        longer = [t for t in pool if t.seconds > cut.seconds]
        if longer:
            return chance.choice(longer)
        extra = chance.choice(pool)
        return replace(extra, seconds=cut.seconds + extra.seconds, limit=0.0, kind="")

    def _duration_pool(self, past: PastBatch, retry: bool) -> list[Duration]:
        """Return the recorded durations to draw from for a first attempt, or a retry, in this batch."""
        if (past.batch_id, retry) not in self.duration_pools:
            first = [t for (_, _, n), t in sorted(past.durations.items()) if not t.cut and n == 1]
            later = [t for (_, _, n), t in sorted(past.durations.items()) if not t.cut and n > 1]
            others = [t for b in self.past.batches if b.submitted.batch_type == past.submitted.batch_type
                      for _, t in sorted(b.durations.items()) if not t.cut]
            self.duration_pools[past.batch_id, retry] = (later or first if retry else first) or later or others
        return self.duration_pools[past.batch_id, retry]
