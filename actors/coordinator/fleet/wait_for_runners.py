"""A wait until runners have carried out an order."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_es.events.errors import SyncError

__all__ = ["Awaited"]


@dataclass(slots=True, eq=False)
class Awaited:
    """Runners that have not carried out an order yet, and the errors of those that failed."""

    message: str
    """Text of the error if a runner failed; {what} in it stands for the runners' errors."""
    waiting_on: set[str]
    errors: dict[str, str] = field(default_factory=dict)

    def mark_done(self, runner: str, error: str | None = None) -> None:
        """Stop waiting for a runner, which has carried out the order, failed with `error`, or ended."""
        if runner in self.waiting_on:
            self.waiting_on.discard(runner)
            if error is not None:
                self.errors[runner] = error

    def error(self, timed_out: str = "") -> SyncError | None:
        """Return the errors of the runners as one error; None if all succeeded. `timed_out` is the error of each runner
        that has not answered; "" if the wait did not time out."""
        errors = dict(self.errors)
        if timed_out:
            errors |= dict.fromkeys(self.waiting_on, timed_out)
        if not errors:
            return None
        return SyncError(self.message.replace("{what}", "; ".join(f"{r}: {e}" for r, e in sorted(errors.items()))))
