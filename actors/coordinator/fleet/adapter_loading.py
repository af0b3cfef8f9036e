"""Coordinator's side of loading LoRA adapters into the runners.

An order lists all adapters that an engine must serve, so a lost or repeated order does no harm. Engines answer requests
while they load an adapter, and a request keeps its version to the end. A new runner gets no unit before it has all
adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from trinity_es.actors.coordinator.decisions import adapter_decisions as adapters
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.messages import AdaptersLoadResult, LoadAdapters, RunnerStatus
from trinity_es.actors.storable_text import clean_text
from trinity_es.events import vocabulary as ev
from trinity_es.projections.adapter_versions import current_adapters
from trinity_es.projections.runner import RunnerState

__all__ = ["AdapterLoading"]

ORDER_LOST_SECONDS = 10.0
"""Time after which an unanswered order is sent again."""
MOST_DOUBLINGS = 6
"""Maximum number of times that the pause before a retry doubles: up to ten minutes."""


class AdapterLoading:
    """Orders to the runners of a registry to serve adapters, and the record of their results."""

    def __init__(self, registry: RunnerRegistry, room: int, models: Collection[str] = ()) -> None:
        """`room` is the number of adapters that engines can hold; `models` are names that adapters may not have."""
        self.registry, self.live, self.room, self.models = registry, registry.live, room, models
        self.waiters: dict[Awaited, tuple[str, int]] = {}
        """Wait for all runners to load an adapter -> name and version of the adapter."""
        self._order_number = int(registry.actor.now() * 1e6)  # higher than the numbers of an earlier coordinator

    # --- runners come and go ----------------------------------------------------------------------------------------
    def on_status(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Have a runner load the adapters that its status lacks. It fails if there are more than engines can hold."""
        if runner.life.model != "rollout":
            return
        runner.adapters = dict(message.adapters)
        excess = adapters.excess_error(self.live.adapters, self.room)
        if excess and not runner.has_adapters:
            if runner.state is RunnerState.READY:
                self.live.record(ev.RunnerFailed(runner=runner.name, incarnation=runner.incarnation, reason=excess))
        elif runner.up:
            # Without room the log may have adapters from an earlier config; requests for them are refused.
            if self.room == 0 or adapters.has_all(self.live.adapters, runner.adapters):
                runner.has_adapters = True
            pause = ORDER_LOST_SECONDS * 2 ** min(max(runner.adapters_failures - 1, 0), MOST_DOUBLINGS)
            is_overdue = self.registry.actor.now() - runner.adapters_since > pause
            if is_overdue or (runner.adapters_order is None and not runner.adapters_failures):
                self.order(runner)
        self._end_waits(runner.name, runner.adapters)

    def failure_reason(self, message: RunnerStatus) -> str:
        """Return which adapters a failed runner with a ready engine lacks, so that it stays failed; "" if none."""
        life = self.live.lives.get((message.name, message.incarnation))
        if message.state != "ready" or message.model != "rollout" or life is None:
            return ""
        runner = self.registry.runners.get(message.name)
        had_all = runner is not None and runner.incarnation == message.incarnation and runner.has_adapters
        if life.state is not RunnerState.FAILED or had_all:
            return ""
        return adapters.missing_error(self.live.adapters, message.adapters, self.room)

    def on_death(self, name: str) -> None:
        for awaited in self.waiters:
            awaited.mark_done(name)

    # --- versions ---------------------------------------------------------------------------------------------------
    def publish(self, new: ev.AdapterPublished) -> Awaited:
        """Publish a version and order every runner to load it. Returns the wait for their answers. Raises SyncError."""
        self.live.record(*adapters.publish(self.live.adapters, new, self.room, self.models))
        awaited = Awaited(
            f"version {new.version} of adapter {new.adapter!r} was not loaded everywhere ({{what}}); these runners "
            "keep the version that they had",
            {r.name for r in self.registry.up_runners() if r.adapters.get(new.adapter) != new.version},
        )
        self.waiters[awaited] = new.adapter, new.version
        self._order_all()
        return awaited

    def remove(self, name: str) -> None:
        """Remove an adapter from every runner, and end the waits for it with an error. Raises SyncError if unknown."""
        self.live.record(*adapters.remove(self.live.adapters, name))
        for awaited, (adapter, _) in self.waiters.items():
            if adapter == name:
                for runner in list(awaited.waiting_on):
                    awaited.mark_done(runner, "the adapter was removed")
        self._order_all()

    def _order_all(self) -> None:
        """Send every runner the current adapters at once, without the pause after earlier failures."""
        for runner in self.registry.rollout_runners():
            runner.adapters_failures = 0
            if runner.up:
                self.order(runner)

    def order(self, runner: RunnerRecord) -> None:
        """Send a runner the current adapters, unless it serves exactly these."""
        current = current_adapters(self.live.adapters) if self.room else {}
        if runner.adapters == {name: event.version for name, event in current.items()}:
            runner.adapters_order = None
            return
        self._order_number += 1
        runner.adapters_order, runner.adapters_since = self._order_number, self.registry.actor.now()
        order = LoadAdapters(runner.incarnation, self._order_number, tuple(current.values()))
        self.registry.send_later(runner.address, order)

    def on_load_result(self, message: AdaptersLoadResult) -> None:
        """Record the adapters that a runner loaded, and those that it could not load; it keeps their old version."""
        runner = self.registry.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        message = replace(message, errors=[(a, version, clean_text(error)) for a, version, error in message.errors])
        excused = adapters.excused_adapters(message, self.live.loaded_adapters)
        self.live.record(*adapters.apply_load_result(
            runner.life, message, self.live.adapters, self.live.loaded_adapters, had_all=runner.has_adapters
        ))
        runner.adapters = dict(message.adapters)
        if message.number == runner.adapters_order:
            runner.adapters_order = None
            runner.adapters_failures = runner.adapters_failures + 1 if message.errors else 0
        if adapters.has_all(self.live.adapters, runner.adapters.keys() | excused):
            runner.has_adapters = True
        self.registry.mark_changed(runner.name)
        errors = {(adapter, version): error for adapter, version, error in message.errors}
        self._end_waits(runner.name, runner.adapters, errors)

    def _end_waits(
        self, runner: str, versions: Mapping[str, int], errors: Mapping[tuple[str, int], str] = MappingProxyType({})
    ) -> None:
        """End the waits for a runner that serves the awaited version of an adapter, or could not load it. `versions`
        has the adapters that it serves, `errors` those that it could not load."""
        for awaited, (adapter, version) in self.waiters.items():
            error = errors.get((adapter, version))
            if versions.get(adapter, -1) >= version:
                awaited.mark_done(runner)
            elif error is not None:
                awaited.mark_done(runner, error)
