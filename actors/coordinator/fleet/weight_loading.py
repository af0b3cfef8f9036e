"""Which weights the runners serve: who loads a new version, when, and who waits for it. The coordinator's side.

All that serve load a version when it is published; one that comes up later, before its first unit. In mode `serve` they
load one after the other (`Rolling`, `rolling_update.py`), so that some go on serving. Where the trainer sends a
version to the engines itself is in `weight_group.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity_es.actors.coordinator.decisions import rolling_update
from trinity_es.actors.coordinator.decisions import weight_decisions as weights
from trinity_es.actors.coordinator.fleet.awaited import Awaited
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.weight_group import WeightGroup
from trinity_es.actors.messages import LoadWeights, RunnerStatus, WeightsLoadResult
from trinity_es.projections.runner import RunnerState, Weights

__all__ = ["WeightLoading"]

LOADING_LOST_SECONDS = 10.0
"""How long a runner may take to say that it loads what it was told to; then it is told again."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """How new weights come to engines that go on answering: one engine after the other."""

    keep: int
    """Minimum of the engines that go on serving."""
    take_out: Callable[[Callable[[], None]], None]
    """It is given what tells an engine to load, and calls that when nothing new is sent to the engine."""
    alive: Iterable[str]
    """Runners that had a process when this coordinator began."""


class WeightLoading:
    """Tells the runners of a registry what to load, and records what came of it."""

    def __init__(self, registry: RunnerRegistry, rolling: Rolling | None = None) -> None:
        """Begin with nobody. `rolling`: load engine by engine; None: all at once."""
        self.registry, self.live = registry, registry.live
        self.waiters: dict[Awaited, int] = {}
        """Those who wait for all runners to have a version, and which."""
        self.group = WeightGroup(registry)
        self._rolling = rolling
        self._unknown = set[str]() if rolling is None else set(rolling.alive)
        """Runners that live and have not said yet how they are."""

    # --- runners come and go ----------------------------------------------------------------------------------------
    def on_new_life(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Take note of a life of a runner that was not known."""
        if self._rolling is not None:
            runner.loading, runner.loading_since = message.loading, self.registry.sender.now()

    def lacks(self, message: RunnerStatus) -> str:
        """Return why a life that failed stays so though its engine is ready, as it could not load the current weights
        and never served; empty: it does not.
        """
        life = self.live.lives.get((message.name, message.incarnation))
        if life is None or life.state is not RunnerState.FAILED or life.served or life.refused is None:
            return ""
        behind = message.state == "ready" and message.model_version != self.live.weights.version
        return life.reason if behind else ""

    def on_status(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Have a runner that said how it is load what it lacks."""
        self._unknown.discard(runner.name)
        if runner.life.model != "rollout":
            return
        for awaited, version in self.waiters.items():
            if message.state == "ready" and message.model_version == version:
                awaited.done(runner.name)  # it told a coordinator that could not write it
        current = self.live.weights
        if runner.loading is not None and message.loading != runner.loading:
            if message.model_version == runner.loading:  # its answer was lost
                seconds = round(self.registry.sender.now() - runner.loading_since, 3)
                self.on_load_result(WeightsLoadResult(runner.name, runner.incarnation, runner.loading, seconds))
            elif self.registry.sender.now() - runner.loading_since > LOADING_LOST_SECONDS:
                runner.loading = None  # the order was lost: it is given again
        if message.state == "ready" and runner.model_version != current.version and current.path:
            if self._rolling is None or not runner.life.served:
                self.load(runner)
            else:
                runner.could_not_load = None  # it may try again
        self.roll()

    def on_death(self, name: str, reason: str) -> None:
        """Wait no more for a runner whose life ended."""
        self._unknown.discard(name)
        for awaited in self.waiters:
            awaited.done(name)
        self.group.on_left(name, reason)
        self.roll()

    def forget(self) -> None:
        """Forget all runners: nobody is known until it says again how it is."""
        self._unknown |= {r.name for r in self.registry.runners.values() if not r.state.gone}
        self.group = WeightGroup(self.registry)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(
        self, version: int, path: str, method: str = "checkpoint", again: bool = False
    ) -> tuple[Awaited, bool]:
        """Have every runner load new weights: `weight_decisions.py` says which may be published.

        Returns also whether the trainer sends them; otherwise runners load them from their place.
        """
        serving = [r.name for r in self.registry.ready() if r.model_version == version]
        new = Weights(version, path, method)
        self.live.record(*weights.publish(self.live.weights, new, serving, again=again))
        from_group = method == "nccl" and self.group.whole()
        awaited = Awaited(
            f"version {version} was not loaded everywhere ({{what}}); it is the current one all the same: "
            "engines that live go on with what they had, one that comes up loads it: sync it again, or a newer one",
            set(),
        )
        self.waiters[awaited] = version
        for runner in self.registry.up():  # one that failed, as it could not load the version before, too
            if runner.model_version != version:
                awaited.waiting_on.add(runner.name)
                runner.could_not_load = None
                if self._rolling is None or from_group:  # a transfer needs all of the group at once
                    self.load(runner, from_group)
        self.roll()
        return awaited, from_group

    def roll(self) -> None:
        """Have those load that can be spared now, where weights are rolled out."""
        version = self.live.weights.version
        if self._rolling is None or not self.live.weights.path:
            return
        for runner in self.registry.ready():
            lacks = runner.loading is None and version not in (runner.model_version, runner.could_not_load)
            if lacks and self.registry.is_leaving(runner.name):  # nobody sends it anything: it can always be spared
                self.load(runner)
        turns = [
            rolling_update.EngineStatus(r.name, r.model_version == version, r.loading is not None,
            r.could_not_load == version)
            for r in self.registry.staying()
            if r.life.served
        ]
        for name in rolling_update.next_to_load(turns, self._rolling.keep, all_known=not self._unknown):
            self.load(self.registry.runners[name])

    def load(self, runner: RunnerRecord, from_group: bool = False) -> None:
        """Have a runner load the current version, once."""
        current = self.live.weights
        if runner.loading == current.version:
            return
        runner.loading, runner.loading_since = current.version, self.registry.sender.now()
        message = LoadWeights(runner.incarnation, current.version, current.path, from_group)
        send = lambda: self.registry.sender.send(runner.address, message)  # noqa: E731
        rolling = self._rolling
        self.live.then(send if rolling is None else lambda: rolling.take_out(send))

    def on_load_result(self, message: WeightsLoadResult) -> None:
        """Take note that a runner loaded a version, or could not and goes on with the one it had."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        current = self.live.weights
        gone = current.in_memory_only and not Path(current.path).is_dir()
        runner.loading = None
        self.registry.changed(runner.name)
        self.live.record(*weights.load_result(runner.life, message, current, place_gone=gone))
        if message.error is None:
            runner.model_version, runner.could_not_load = message.version, None
        else:
            runner.could_not_load = message.version
            self.group.on_left(message.name, message.error)
        for awaited, version in self.waiters.items():
            if version <= message.version:
                awaited.done(message.name, message.error)
        if message.version < current.version and self._rolling is None:
            self.load(runner)
        self.roll()
