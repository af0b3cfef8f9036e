"""Which LoRA adapters the runners serve: who is told to load what, and who waits for it. The coordinator's side.

An order names all adapters that an engine is to serve, so it may be lost, or come twice. Engines answer on while they
load one: a request keeps the version that it began with. A runner that comes up gets no unit before it has them all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from trinity_es.actors.coordinator.decisions import adapter_decisions as adapters
from trinity_es.actors.coordinator.fleet.awaited import Awaited
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.messages import AdaptersLoadResult, LoadAdapters, RunnerStatus
from trinity_es.actors.reports import clean_text
from trinity_es.events import vocabulary as ev
from trinity_es.projections.adapter_versions import current_adapters
from trinity_es.projections.runner import RunnerState

__all__ = ["AdapterLoading"]

ORDER_LOST_SECONDS = 10.0
"""How long a runner may take to load what it was told to; then it is told again, which does no harm."""
MOST_DOUBLINGS = 6
"""How often the pause doubles before a runner tries again what it could not load: to ten minutes."""


class AdapterLoading:
    """Tells the runners of a registry which adapters to serve, and records what came of it."""

    def __init__(self, registry: RunnerRegistry, most: int, models: Collection[str] = ()) -> None:
        """Begin with nobody. `most`: adapters that engines have room for; 0: they serve none. `models`: their names."""
        self.registry, self.live, self.most, self.models = registry, registry.live, most, models
        self.waiters: dict[Awaited, tuple[str, int]] = {}
        """Those who wait for all runners to have a version of an adapter, and which."""
        self._orders = int(registry.sender.now() * 1e6)  # none that a runner has of an earlier coordinator

    # --- runners come and go ----------------------------------------------------------------------------------------
    def on_status(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Have a runner that said how it is load what it lacks."""
        if runner.life.model != "rollout":
            return
        runner.adapters = dict(message.adapters)
        reason = adapters.too_many(self.live.adapters, self.most)
        if reason and not runner.has_adapters:
            if runner.state is RunnerState.READY:
                failed = ev.RunnerFailed(runner=runner.name, incarnation=runner.incarnation, reason=reason)
                self.live.record(failed)
        elif runner.up:
            none = self.most == 0  # a log may have some, of a start with another config: whoever names one is refused
            had = runner.has_adapters or none
            runner.has_adapters = had or adapters.has_all(self.live.adapters, runner.adapters)
            pause = ORDER_LOST_SECONDS * 2 ** min(max(runner.adapters_failures - 1, 0), MOST_DOUBLINGS)
            late = self.registry.sender.now() - runner.adapters_since > pause
            if late or (runner.adapters_order is None and not runner.adapters_failures):
                self.order(runner)
        self._look(runner.name, runner.adapters)

    def lacks(self, message: RunnerStatus) -> str:
        """Return why a life that failed stays so though its engine is ready, as it lacks adapters; empty: it does not.

        The log knows of the failure, so another coordinator goes on with it.
        """
        life = self.live.lives.get((message.name, message.incarnation))
        if message.state != "ready" or message.model != "rollout" or life is None:
            return ""
        runner = self.registry.runners.get(message.name)
        had = runner is not None and runner.incarnation == message.incarnation and runner.has_adapters
        if life.state is not RunnerState.FAILED or had:
            return ""
        return adapters.lacks(self.live.adapters, message.adapters, self.most)

    def on_death(self, name: str) -> None:
        """Wait no more for a runner whose life ended."""
        for awaited in self.waiters:
            awaited.done(name)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(self, new: ev.AdapterPublished) -> Awaited:
        """Have every runner load a version: `adapter_decisions.py` says which may be published."""
        self.live.record(*adapters.publish(self.live.adapters, new, self.most, self.models))
        awaited = Awaited(
            f"version {new.version} of adapter {new.adapter!r} was not loaded everywhere ({{what}}); they go on with "
            "the version that they had",
            {r.name for r in self.registry.up() if r.adapters.get(new.adapter) != new.version},
        )
        self.waiters[awaited] = new.adapter, new.version
        self._order_anew()
        return awaited

    def remove(self, name: str) -> None:
        """Take an adapter back from every runner."""
        self.live.record(*adapters.remove(self.live.adapters, name))
        for awaited, (adapter, _) in self.waiters.items():
            if adapter == name:
                for runner in list(awaited.waiting_on):
                    awaited.done(runner, "the adapter was removed")
        self._order_anew()

    def _order_anew(self) -> None:
        """Tell every runner what it is to serve now; what it could not load before is no reason to put that off."""
        for runner in self.registry.rollout():
            runner.adapters_failures = 0
            if runner.up:
                self.order(runner)

    def order(self, runner: RunnerRecord) -> None:
        """Tell a runner what it is to serve, where that is not what it serves."""
        current = current_adapters(self.live.adapters) if self.most else {}
        if runner.adapters == {name: event.version for name, event in current.items()}:
            runner.adapters_order = None
            return
        self._orders += 1
        runner.adapters_order, runner.adapters_since = self._orders, self.registry.sender.now()
        order = LoadAdapters(runner.incarnation, self._orders, tuple(current.values()))
        self.registry.send_later(runner.address, order)

    def on_load_result(self, message: AdaptersLoadResult) -> None:
        """Take note of what a runner loaded, and of what it could not: then it goes on with what it had."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        message = replace(message, errors=[(a, version, clean_text(error)) for a, version, error in message.errors])
        excused = adapters.excused(message, self.live.loaded_adapters)
        self.live.record(*adapters.load_result(
            runner.life, message, self.live.adapters, self.live.loaded_adapters, had_all=runner.has_adapters
        ))
        runner.adapters = dict(message.adapters)
        if message.number == runner.adapters_order:
            runner.adapters_order = None
            runner.adapters_failures = runner.adapters_failures + 1 if message.errors else 0
        has = runner.adapters.keys() | excused
        runner.has_adapters = runner.has_adapters or adapters.has_all(self.live.adapters, has)
        self.registry.changed(runner.name)
        failed = {(adapter, version): error for adapter, version, error in message.errors}
        self._look(runner.name, runner.adapters, failed)

    def _look(
        self, runner: str, has: dict[str, int], failed: dict[tuple[str, int], str] | None = None
    ) -> None:
        """Let those go who wait for what this runner has, or could not load."""
        for awaited, (adapter, version) in self.waiters.items():
            error = (failed or {}).get((adapter, version))
            if has.get(adapter, -1) >= version:
                awaited.done(runner)
            elif error is not None:
                awaited.done(runner, error)
