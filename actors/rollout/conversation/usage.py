"""What one run asked of its model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Usage"]


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one `Model` asked of its engine."""

    requests: int = 0
    prompt_tokens: int = 0
    """A prompt of n > 1 answers counts once."""
    response_tokens: int = 0
    min_version: int | None = None
    """Oldest model version that made a token; None before the first request."""
    max_version: int | None = None
    continued: int = 0
    """Requests whose prompt went on from an earlier answer."""
    forks: int = 0
    """Turns whose conversation went on in a new sequence, since the template renders it otherwise."""

    def saw(self, *versions: int) -> None:
        known = [v for v in (self.min_version, self.max_version) if v is not None]
        self.min_version, self.max_version = min([*known, *versions]), max([*known, *versions])
