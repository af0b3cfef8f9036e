"""Somebody waits until runners have done what they were told to."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_es.events.errors import SyncError

__all__ = ["Awaited"]


@dataclass(slots=True, eq=False)
class Awaited:
    """The runners that have not done it yet, and what went wrong with others."""

    failure: str
    """The error's sentence, in which {what} stands for what each runner said."""
    waiting_on: set[str]
    errors: dict[str, str] = field(default_factory=dict)

    def done(self, runner: str, error: str | None = None) -> None:
        """Wait no more for this runner: it did it, or said this error, or ended."""
        if runner in self.waiting_on:
            self.waiting_on.discard(runner)
            if error is not None:
                self.errors[runner] = error

    def error(self, timed_out: str = "") -> SyncError | None:
        """Return what went wrong, when it is over."""
        errors = self.errors | (dict.fromkeys(self.waiting_on, timed_out) if timed_out else {})
        if not errors:
            return None
        return SyncError(self.failure.replace("{what}", "; ".join(f"{r}: {e}" for r, e in sorted(errors.items()))))
