"""Progress of a run, for the loops that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.events.values import BatchId

__all__ = ["RunProgress"]


class RunProgress:
    """Progress of a run. Changed by `note`, on one event loop."""

    def __init__(self) -> None:
        self.submitted = 0
        """Last step that was submitted."""
        self.ended = False
        """True if no further step will be submitted."""
        self.generated = 0
        """Step up to which all are finalized or aborted."""
        self.trained = 0
        """Step up to which all were trained on."""
        self.done = 0
        """Last step of the last complete period, whose weights the engines serve."""
        self.evals: dict[BatchId, bool] = {}
        """Evals that were submitted, with True for those that ended."""
        self._changed = asyncio.Event()

    def note(self, *, evals: Mapping[BatchId, bool] | None = None, **attributes: Any) -> None:
        """Add these evals, set these attributes, and wake every call of `until`."""
        for name, value in attributes.items():
            setattr(self, name, value)
        self.evals.update(evals or {})
        self._changed.set()
        self._changed = asyncio.Event()  # each change wakes those that wait at that moment

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this condition on the progress holds."""
        while not condition():
            await self._changed.wait()

    @property
    def all_trained(self) -> bool:
        return self.ended and self.trained >= self.submitted

    @property
    def evals_over(self) -> bool:
        return all(self.evals.values())
