"""Which weights the runners serve: who loads a new version, when, and who waits for it. The coordinator's side.

All that serve load a version when it is published; one that comes up later, before its first unit. In mode `serve` they
load one after the other (`roll_with`, `rolling_update.py`), so that some go on serving. Where the trainer sends a
version to the engines itself is in `weight_group.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trinity_es.actors.coordinator.decisions import rolling_update
from trinity_es.actors.coordinator.fleet.registry import GONE, RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.weight_group import WeightGroup
from trinity_es.actors.messages import LoadWeights, RunnerStatus, WeightsLoadResult
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogError, SyncError

__all__ = ["SyncWaiter", "WeightLoading"]

LOADING_LOST_SECONDS = 10.0
"""How long a runner may take to say that it loads what it was told to; then it is told again."""
FLEETING = ("memory", "nccl")
"""Ways to publish weights that leave no copy of them on a disk."""


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
            with contextlib.suppress(LogError):  # then it gets its first weights before its first request
                runner.served = self.live.has_served(runner.name, runner.incarnation)
            runner.loading, runner.loading_since = message.loading, self.registry.sender.now()

    def told(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Have a runner that said how it is load what it lacks."""
        self._unknown.discard(runner.name)
        if runner.model != "rollout":
            return
        for waiter in self.sync_waiters:
            if message.state == "ready" and message.model_version == waiter.version:
                waiter.waiting_on.discard(runner.name)  # it told a coordinator that could not write it
        version, path = self.live.weights
        if runner.loading is not None and message.loading != runner.loading:
            if message.model_version == runner.loading:
                runner.loading = None  # its answer was lost
            elif self.registry.sender.now() - runner.loading_since > LOADING_LOST_SECONDS:
                runner.loading = None  # the order was lost: it is given again
        if message.state == "ready" and runner.model_version != version and path:
            if self._keep is None or not runner.served:
                self.load(runner)
            else:
                runner.could_not_load = None  # it may try again
        elif message.state == "ready":
            runner.served = True
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
        self._unknown |= {r.name for r in self.registry.runners.values() if r.state not in GONE}
        self.group = WeightGroup(self.registry)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(self, version: int, path: str, method: str = "checkpoint", again: bool = False) -> SyncWaiter:
        """Have every runner load new weights.

        A version that no runner could load may be published again from another place. One that was published from
        memory may be published again as a checkpoint: the same weights, which lie on a disk now too, so nobody loads
        them again. `again`: its place was lost and has been written anew. Raises SyncError for an older version, and
        for one that is served from another place.
        """
        current, current_path = self.live.weights
        if version < current:
            raise SyncError(f"weights version {version} is older than the current one, {current}")
        if again or (version, path) != (current, current_path):
            saved = method == "checkpoint" and self.live.weights_method in FLEETING
            serving = [r.name for r in self.registry.rollout() if r.state == "ready" and r.model_version == version]
            if version == current and serving and not (saved or again):
                raise SyncError(
                    f"weights version {version} is served already by {', '.join(serving)}, from "
                    f"{current_path or 'the model as it was given'}: give {path} a new version"
                )
            published = ev.WeightsPublished(version=version, path=path, method=method)
            codec.check(published)
            self.live.record("weights", [published])
            self.live.weights, self.live.weights_method = (version, path), method
        waiter = SyncWaiter(version, from_group=method == "nccl" and self.group.whole())
        self.sync_waiters.append(waiter)
        for runner in self.registry.rollout():
            if runner.state == "ready" and runner.model_version != version:
                waiter.waiting_on.add(runner.name)
                runner.could_not_load = None
                if self._keep is None or waiter.from_group:  # a transfer needs all of the group at once
                    self.load(runner, waiter.from_group)
        self.roll()
        return waiter

    def roll(self) -> None:
        """Have those load that can be spared now, where weights are rolled out."""
        version, path = self.live.weights
        if self._keep is None or not path:
            return
        turns = [
            rolling_update.EngineStatus(r.name, r.model_version == version, r.loading is not None,
            r.could_not_load == version)
            for r in self.registry.rollout()
            if r.state == "ready" and r.served
        ]
        for name in rolling_update.next_to_load(turns, self._keep, all_known=not self._unknown):
            self.load(self.registry.runners[name])

    def load(self, runner: RunnerRecord, from_group: bool = False) -> None:
        """Have a runner load the current version, once."""
        version, path = self.live.weights
        if runner.loading == version:
            return
        runner.loading, runner.loading_since = version, self.registry.sender.now()
        message = LoadWeights(runner.incarnation, version, path, from_group)
        self.live.then(lambda: self._take_out(lambda: self.registry.sender.send(runner.address, message)))

    def done(self, message: WeightsLoadResult) -> None:
        """Take note that a runner loaded a version, or could not and goes on with the one it had."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        runner.loading = None
        who = {"runner": message.name, "incarnation": message.incarnation, "version": message.version}
        event: ev.Event
        if message.error is None:
            runner.model_version, runner.served, runner.could_not_load = message.version, True, None
            event = ev.WeightsLoaded(**who, seconds=message.seconds)  # type: ignore[arg-type]  # a dict of both types
        else:
            event = ev.WeightsFailed(**who, error=message.error)  # type: ignore[arg-type]  # a dict of both types
            runner.could_not_load = message.version
        events: list[ev.Event] = [event]
        if message.error is not None:
            self.group.left(message.name, message.error)
        if message.error is not None and not runner.served:
            # It came up with older weights than the current ones: better no runner than wrong weights.
            runner.state, runner.reason = "failed", f"it could not load weights {message.version}: {message.error}"
            if self.live.weights_method in FLEETING and not Path(self.live.weights[1]).is_dir():
                runner.reason += (
                    "; they were in shared memory, which a restart of the machine empties: publish them again "
                    "(sync_weights, or `trinity-es resume` where an explorer trains)"
                )
            events.append(
                ev.RunnerFailed(runner=message.name, incarnation=message.incarnation, reason=runner.reason)
            )
        self.live.record(f"runner/{message.name}", events)
        for waiter in self.sync_waiters:
            if waiter.version <= message.version and message.name in waiter.waiting_on:
                waiter.waiting_on.discard(message.name)
                if message.error is not None:
                    waiter.errors[message.name] = message.error
        if message.version < self.live.weights[0] and self._keep is None:
            self.load(runner)
        self.roll()
