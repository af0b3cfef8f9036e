"""Index of the units in flight by batch and runner, so that a message about one runner costs no walk over all units."""

from __future__ import annotations

from collections.abc import Iterable

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState

__all__ = ["UnitsInFlight"]

Key = tuple[int, int]
"""Task and first run."""
Life = tuple[str, int]
"""Runner and incarnation."""


class UnitsInFlight:
    """Units in flight by batch and by (runner, incarnation): the same units as in the `flights` of the batches."""

    def __init__(self, batches: Iterable[BatchState] = ()) -> None:
        self.loads: dict[Life, int] = {}
        """(runner, incarnation) -> number of its units, for runners that have any."""
        self.changed_runners: dict[str, None] = {}
        """Runners whose number of free places may have changed since the last dispatch."""
        self._units: dict[tuple[BatchId, Life], dict[Key, None]] = {}
        """Units by batch and life, in the order of dispatch."""
        self._lives: dict[str, dict[int, None]] = {}
        """Incarnations of each runner that have units."""
        for batch in batches:
            for key, flight in batch.flights.items():
                self._add(batch.batch_id, (flight.runner, flight.incarnation), key)

    def units_of(self, batch_id: BatchId, runner: str, incarnation: int) -> list[Key]:
        """Return the units of a batch that this incarnation of a runner has, in the order of dispatch."""
        return list(self._units.get((batch_id, (runner, incarnation)), ()))

    def incarnations(self, runner: str) -> list[int]:
        """Return the incarnations of a runner that have units."""
        return sorted(self._lives.get(runner, ()))

    def evolve(self, batch: BatchState, event: ev.Event) -> None:
        """Apply one more event of a batch; `batch` is its state after this event."""
        match event:
            case ev.TasksDispatched():
                for unit in event.units:
                    self._add(batch.batch_id, (event.runner, event.incarnation), (unit.task, unit.run_id_base))
            case ev.RunsFinished() | ev.AttemptFailed():
                key = event.task, event.run_id_base
                if key not in batch.flights:  # else some of its runs are still open
                    self._drop(batch.batch_id, (event.runner, event.incarnation), [key])
            case ev.TaskDropped() | ev.BatchFinalized() | ev.BatchAborted():
                for life in list(self.loads):
                    units = self._units.get((batch.batch_id, life), {})
                    self._drop(batch.batch_id, life, [k for k in units if batch.state.ended or k not in batch.flights])

    def _add(self, batch_id: BatchId, life: Life, key: Key) -> None:
        runner, incarnation = life
        self._units.setdefault((batch_id, life), {})[key] = None
        self.loads[life] = self.loads.get(life, 0) + 1
        self._lives.setdefault(runner, {})[incarnation] = None
        self.changed_runners[runner] = None

    def _drop(self, batch_id: BatchId, life: Life, keys: Iterable[Key]) -> None:
        """Remove units of a runner's incarnation. Units that it does not have are ignored."""
        runner, incarnation = life
        units = self._units.get((batch_id, life), {})
        dropped = [units.pop(key) for key in keys if key in units]
        if not dropped:
            return
        self.changed_runners[runner] = None
        self.loads[life] -= len(dropped)
        if not self.loads[life]:
            del self.loads[life], self._lives[runner][incarnation]
        if not units:
            del self._units[batch_id, life]
