"""Which weights the runners serve: who loads a new version, when, and who waits for it. The coordinator's side.

All that serve load a version when it is published; one that comes up later, before its first unit. In mode `serve` they
load one after the other (`roll_with`, `rolling_update.py`), so that some go on serving. Where the trainer sends a
version to the engines itself is in `weight_group.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trinity_es.actors.coordinator.decisions import rolling_update
from trinity_es.actors.coordinator.decisions import weights as decisions
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.weight_group import WeightGroup
from trinity_es.actors.messages import LoadWeights, RunnerStatus, WeightsLoadResult
from trinity_es.events.errors import SyncError
from trinity_es.projections.runner import Weights

__all__ = ["SyncWaiter", "WeightLoading"]

LOADING_LOST_SECONDS = 10.0
"""How long a runner may take to say that it loads what it was told to; then it is told again."""


@dataclass(slots=True)
class SyncWaiter:
    """Somebody who waits for all runners to have a version."""

    version: int
    waiting_on: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    from_group: bool = False
    """The trainer sends it; otherwise runners load it from its place."""

    def error(self, timed_out: str = "") -> SyncError | None:
        """Return what went wrong, when it is over."""
        errors = self.errors | (dict.fromkeys(self.waiting_on, timed_out) if timed_out else {})
        if not errors:
            return None
        what = "; ".join(f"{name}: {error}" for name, error in sorted(errors.items()))
        return SyncError(f"version {self.version} was not loaded everywhere ({what}); they serve what they had")


class WeightLoading:
    """Tells the runners of a registry what to load, and records what came of it."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self.registry, self.live = registry, registry.live
        self.sync_waiters: list[SyncWaiter] = []
        self.group = WeightGroup(registry)
        self._keep: int | None = None
        self._take_out: Callable[[Callable[[], None]], None] = lambda load: load()
        self._unknown: set[str] = set()
        """Runners that live and have not said yet how they are."""

    def roll_with(self, keep: int, take_out: Callable[[Callable[[], None]], None], alive: Iterable[str]) -> None:
        """Load new weights engine by engine, so that `keep` of them go on serving.

        `take_out` is given what tells a runner to load: to be done when nothing new is sent to it. `alive`: runners
        that have a process.
        """
        self._keep, self._take_out, self._unknown = keep, take_out, set(alive)

    # --- runners come and go ----------------------------------------------------------------------------------------
    def began(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Take note of a life of a runner that was not known."""
        if self._keep is not None:
            runner.loading, runner.loading_since = message.loading, self.registry.sender.now()

    def told(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Have a runner that said how it is load what it lacks."""
        self._unknown.discard(runner.name)
        if runner.life.model != "rollout":
            return
        for waiter in self.sync_waiters:
            if message.state == "ready" and message.model_version == waiter.version:
                waiter.waiting_on.discard(runner.name)  # it told a coordinator that could not write it
        current = self.live.weights
        if runner.loading is not None and message.loading != runner.loading:
            if message.model_version == runner.loading:  # its answer was lost
                seconds = round(self.registry.sender.now() - runner.loading_since, 3)
                self.done(WeightsLoadResult(runner.name, runner.incarnation, runner.loading, seconds))
            elif self.registry.sender.now() - runner.loading_since > LOADING_LOST_SECONDS:
                runner.loading = None  # the order was lost: it is given again
        if message.state == "ready" and runner.model_version != current.version and current.path:
            if self._keep is None or not runner.life.served:
                self.load(runner)
            else:
                runner.could_not_load = None  # it may try again
        self.roll()

    def lost(self, name: str, reason: str) -> None:
        """Wait no more for a runner whose life ended."""
        self._unknown.discard(name)
        for waiter in self.sync_waiters:
            waiter.waiting_on.discard(name)
        self.group.left(name, reason)
        self.roll()

    def forget(self) -> None:
        """Forget all runners: nobody is known until it says again how it is."""
        self._unknown |= {r.name for r in self.registry.runners.values() if not r.state.gone}
        self.group = WeightGroup(self.registry)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(self, version: int, path: str, method: str = "checkpoint", again: bool = False) -> SyncWaiter:
        """Have every runner load new weights: `decisions/weights.py` says which may be published."""
        serving = [r.name for r in self.registry.ready() if r.model_version == version]
        new = Weights(version, path, method)
        self.live.record(*decisions.publish(self.live.weights, new, serving, again=again))
        waiter = SyncWaiter(version, from_group=method == "nccl" and self.group.whole())
        self.sync_waiters.append(waiter)
        for runner in self.registry.ready():
            if runner.model_version != version:
                waiter.waiting_on.add(runner.name)
                runner.could_not_load = None
                if self._keep is None or waiter.from_group:  # a transfer needs all of the group at once
                    self.load(runner, waiter.from_group)
        self.roll()
        return waiter

    def roll(self) -> None:
        """Have those load that can be spared now, where weights are rolled out."""
        version = self.live.weights.version
        if self._keep is None or not self.live.weights.path:
            return
        turns = [
            rolling_update.EngineStatus(r.name, r.model_version == version, r.loading is not None,
            r.could_not_load == version)
            for r in self.registry.ready()
            if r.life.served
        ]
        for name in rolling_update.next_to_load(turns, self._keep, all_known=not self._unknown):
            self.load(self.registry.runners[name])

    def load(self, runner: RunnerRecord, from_group: bool = False) -> None:
        """Have a runner load the current version, once."""
        current = self.live.weights
        if runner.loading == current.version:
            return
        runner.loading, runner.loading_since = current.version, self.registry.sender.now()
        message = LoadWeights(runner.incarnation, current.version, current.path, from_group)
        self.live.then(lambda: self._take_out(lambda: self.registry.sender.send(runner.address, message)))

    def done(self, message: WeightsLoadResult) -> None:
        """Take note that a runner loaded a version, or could not and goes on with the one it had."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        current = self.live.weights
        gone = current.in_memory_only and not Path(current.path).is_dir()
        runner.loading = None
        self.live.record(*decisions.load_result(runner.life, message, current, place_gone=gone))
        if message.error is None:
            runner.model_version, runner.could_not_load = message.version, None
        else:
            runner.could_not_load = message.version
            self.group.left(message.name, message.error)
        for waiter in self.sync_waiters:
            if waiter.version <= message.version and message.name in waiter.waiting_on:
                waiter.waiting_on.discard(message.name)
                if message.error is not None:
                    waiter.errors[message.name] = message.error
        if message.version < current.version and self._keep is None:
            self.load(runner)
        self.roll()
