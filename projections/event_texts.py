"""Texts of events that several views show: what an attempt goes on from, and why a batch was not finalized."""

from __future__ import annotations

from trinity_es.events import vocabulary as ev

__all__ = ["counted", "kept_text", "missing_text"]


def counted(n: int, name: str) -> str:
    """Return a number with its noun, as "1 task", "1,200 tasks" or "2 batches"."""
    return f"{n:,} {name}{'' if n == 1 else 'es' if name.endswith('ch') else 's'}"


def kept_text(event: ev.AttemptKept) -> str:
    """Describe what was kept of a lost attempt, by which runner, and which of its tokens can't be used."""
    answers = [counted(n, f"{form} answer") for form, n in (("whole", event.calls), ("partial", event.open_calls)) if n]
    parts = [f"{counted(event.tokens, 'token')} of {' and '.join(answers)}"] if answers else []
    if event.max_tokens and (event.calls, event.open_calls) == (0, 1):
        parts = [f"token {event.tokens:,} of {event.max_tokens:,}"]
    parts += [counted(event.steps, "step result")] if event.steps else []
    losses = [f"; {counted(n, 'token')} can't go on because of {name}" for name, n in sorted(event.not_kept.items())]
    if event.possibly_delivered:
        steps = ", ".join(map(repr, event.possibly_delivered))
        losses.append(f"; runs start over because step {steps} may have had its effect")
    return f"{' and '.join(parts) or 'nothing'}, kept by {event.runner} #{event.incarnation}{''.join(losses)}"


def missing_text(event: ev.GroupsMissing) -> str:
    """Return how many usable groups a batch has and lacks, and what took the others, in words."""
    losses = ", ".join(f"{count} by {cause}" for cause, count in sorted(event.lost.items()))
    return (f"it has {counted(event.usable, 'usable group')} and needs {event.missing} more"
            + (f" (lost: {losses})" if losses else ""))
