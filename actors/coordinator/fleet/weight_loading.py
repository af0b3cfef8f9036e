"""Coordinator's side of loading published weights into the runners.

Every serving runner loads a version when it is published; a runner that starts later loads it before its first unit. In
mode `serve` they load one after the other (`Rolling`, `rolling_update.py`), so that some go on serving. If a trainer
sends weights directly to the engines, `weight_group.py` has the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity_es.actors.coordinator.decisions import rolling_update
from trinity_es.actors.coordinator.decisions import weight_decisions as weights
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.coordinator.fleet.weight_group import WeightGroup
from trinity_es.actors.messages import LoadWeights, RunnerStatus, WeightsLoadResult
from trinity_es.projections.runner import RunnerState, Weights

__all__ = ["WeightLoading"]

LOADING_LOST_SECONDS = 10.0
"""Time after which an order to load is sent again if the runner does not report that it is loading."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """Settings of a rolling update, which loads weights engine by engine while the others answer requests."""

    keep: int
    """Minimum number of engines that go on serving."""
    take_out: Callable[[Callable[[], None]], None]
    """Function that takes an engine out of rotation, then calls its argument, which sends the order to load."""
    living_runners: Iterable[str]
    """Runners that had a process when this coordinator started."""


class WeightLoading:
    """Orders to the runners of a registry to load weights, and the record of their results."""

    def __init__(self, registry: RunnerRegistry, rolling: Rolling | None = None) -> None:
        """Without `rolling`, all engines load at once."""
        self.registry, self.live = registry, registry.live
        self.waiters: dict[Awaited, int] = {}
        """Wait for all runners to load a version -> the version."""
        self.group = WeightGroup(registry)
        self._rolling = rolling
        self._unreported = set[str]() if rolling is None else set(rolling.living_runners)
        """Living runners whose status this coordinator still lacks."""

    # --- runners come and go ----------------------------------------------------------------------------------------
    def on_new_life(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Note the version that a runner's new process is loading, so that a rolling update counts it."""
        if self._rolling is not None:
            runner.loading, runner.loading_since = message.loading, self.registry.actor.now()

    def failure_reason(self, message: RunnerStatus) -> str:
        """Return why a failed runner with a ready engine stays failed: it never served and could not load the current
        weights. Returns "" if it does not stay failed."""
        life = self.live.lives.get((message.name, message.incarnation))
        if life is None or life.state is not RunnerState.FAILED or life.was_current or life.refused is None:
            return ""
        has_old_weights = message.state == "ready" and message.model_version != self.live.weights.version
        return life.reason if has_old_weights else ""

    def on_status(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Order a runner to load the current weights if its status has others. This also repeats a lost order."""
        self._unreported.discard(runner.name)
        if runner.life.model != "rollout":
            return
        for awaited, version in self.waiters.items():
            if message.state == "ready" and message.model_version == version:
                awaited.mark_done(runner.name)  # its result went to a coordinator that could not record it
        current = self.live.weights
        if runner.loading is not None and message.loading != runner.loading:
            if message.model_version == runner.loading:  # its answer was lost
                seconds = round(self.registry.actor.now() - runner.loading_since, 3)
                self.on_load_result(WeightsLoadResult(runner.name, runner.incarnation, runner.loading, seconds))
            elif self.registry.actor.now() - runner.loading_since > LOADING_LOST_SECONDS:
                runner.loading = None  # the order was lost, and is sent again below
        if message.state == "ready" and runner.model_version != current.version and current.path:
            if self._rolling is None or not runner.life.was_current:
                self.load(runner)
            else:
                runner.could_not_load = None  # it may try again
        self.continue_rolling()

    def on_death(self, name: str, reason: str) -> None:
        self._unreported.discard(name)
        for awaited in self.waiters:
            awaited.mark_done(name)
        self.group.on_left(name, reason)
        self.continue_rolling()

    def forget(self) -> None:
        """Drop all state of runners, until each reports its status again."""
        self._unreported |= {r.name for r in self.registry.runners.values() if not r.state.gone}
        self.group = WeightGroup(self.registry)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(
        self, version: int, path: str, method: str = "checkpoint", *, again: bool = False
    ) -> tuple[Awaited, bool]:
        """Publish weights and order every runner to load them. Raises SyncError.

        `method`: "checkpoint", "memory" or "nccl". `again`: the version was lost from memory and written again.
        Returns the wait until all have loaded them, and True if the trainer sends the weights over its process group
        (otherwise runners load them from `path`)."""
        serving_runners = [r.name for r in self.registry.ready_runners() if r.model_version == version]
        new = Weights(version, path, method)
        self.live.record(*weights.publish(self.live.weights, new, serving_runners, again=again))
        from_group = method == "nccl" and self.group.is_whole()
        awaited = Awaited(
            f"version {version} was not loaded everywhere ({{what}}). It is now the current one, but these engines "
            "keep their weights: sync this version again, or a newer one",
            set(),
        )
        self.waiters[awaited] = version
        for runner in self.registry.up_runners():  # also runners that failed to load the previous version
            if runner.model_version != version:
                awaited.waiting_on.add(runner.name)
                runner.could_not_load = None
                if self._rolling is None or from_group:  # a transfer needs all of the group at once
                    self.load(runner, from_group=from_group)
        self.continue_rolling()
        return awaited, from_group

    def continue_rolling(self) -> None:
        """In a rolling update, have further engines load if enough others go on serving. Otherwise do nothing."""
        version = self.live.weights.version
        if self._rolling is None or not self.live.weights.path:
            return
        for runner in self.registry.ready_runners():
            must_load = runner.loading is None and version not in (runner.model_version, runner.could_not_load)
            if must_load and self.registry.is_leaving(runner.name):  # it gets no requests, so it can always be spared
                self.load(runner)
        engines = [
            rolling_update.EngineStatus(
                r.name, has_version=r.model_version == version, is_loading=r.loading is not None,
                has_failed=r.could_not_load == version)
            for r in self.registry.staying_runners()
            if r.life.was_current
        ]
        for name in rolling_update.next_to_load(engines, self._rolling.keep, all_reported=not self._unreported):
            self.load(self.registry.runners[name])

    def load(self, runner: RunnerRecord, *, from_group: bool = False) -> None:
        """Order a runner to load the current version, unless it is loading it already. `from_group` means that the
        trainer sends the weights over its process group."""
        current = self.live.weights
        if runner.loading == current.version:
            return
        runner.loading, runner.loading_since = current.version, self.registry.actor.now()
        message = LoadWeights(runner.incarnation, current.version, current.path, from_group)
        send = lambda: self.registry.actor.send(runner.address, message)  # noqa: E731
        rolling = self._rolling
        self.live.when_durable(send if rolling is None else lambda: rolling.take_out(send))

    def on_load_result(self, message: WeightsLoadResult) -> None:
        """Record that a runner loaded a version, or that it could not and keeps its weights."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        current = self.live.weights
        path_gone = current.in_memory_only and not Path(current.path).is_dir()
        runner.loading = None
        self.registry.mark_changed(runner.name)
        self.live.record(*weights.apply_load_result(runner.life, message, current, path_gone=path_gone))
        if message.error is None:
            runner.model_version, runner.could_not_load = message.version, None
        else:
            runner.could_not_load = message.version
            self.group.on_left(message.name, message.error)
        for awaited, version in self.waiters.items():
            if version <= message.version:
                awaited.mark_done(message.name, message.error)
        if message.version < current.version and self._rolling is None:
            self.load(runner)
        self.continue_rolling()
