"""Texts on the states of runners, for `why` and for the problems of a system. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_es.events.errors import split_error
from trinity_es.projections.why.answer import Waiting, restart_advice, span
from trinity_es.projections.why.system_state import RunnerSnapshot, SystemSnapshot

__all__ = [
    "SILENT_SECONDS", "behind", "coordinator_away", "has_no_server", "idle", "problem", "refuses", "serves", "short",
]

SILENT_SECONDS = 10.0
"""Seconds without a heartbeat (sent every 4 s) or an answer of the engine's loop after which a runner is silent."""
AWAITED_SECONDS = 10.0
"""Seconds after which an engine that waits for something external, such as its server, is a problem."""
LOADING_SECONDS = 300.0
"""Seconds after which loading weights is a problem. Nothing else notices an external server that hangs in it."""


def _loading(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> int | None:
    """Return the weights version that a runner is loading, by the system's status or else by the log."""
    if runner.loading is not None:
        return runner.loading
    is_behind = snapshot.published_at is not None and runner.model_version != snapshot.weights
    return snapshot.weights if is_behind and not refuses(snapshot, runner) else None


def refuses(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> bool:
    """Return True if a runner failed to load the current weights and keeps the previous ones."""
    return runner.refused is not None and runner.refused[0] == snapshot.weights


def serves(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> bool:
    """Return True if a runner has the current weights and gets units."""
    return runner.state == "ready" and _loading(snapshot, runner) is None


def has_no_server(snapshot: SystemSnapshot, live: Mapping[str, Any] | None, gone: bool) -> bool:
    """Return True if no external server is meant to be an engine, by the system's status or else by the log.

    `gone`: whether a server was removed.
    """
    servers = (live or {}).get("servers")
    return snapshot.of_servers and (gone if servers is None else not any(s["wanted"] for s in servers))


def idle(snapshot: SystemSnapshot, runner: RunnerSnapshot, now: float) -> Waiting:
    """Return a `Waiting` for a runner that gets no units, because of its state."""
    return _waiting(runner, *_state(snapshot, runner, now))


def behind(runner: RunnerSnapshot) -> Waiting:
    """Return a `Waiting` for a runner that gets units but generates with older weights than the current ones."""
    version, error = runner.refused or (None, "")
    text = f"goes on with weights version {runner.model_version}: it can't load version {version}: {short(error)}"
    return _waiting(runner, "refused", text, None, person=False)


def problem(snapshot: SystemSnapshot, runner: RunnerSnapshot, now: float) -> str | None:
    """Return the problem of a runner and what to do, as a text to follow its name; None if it has no problem."""
    waiting: Waiting | None = None
    wait_text = ""
    match runner.state:
        case "retired":
            return None
        case "failed" | "quarantined" | "lost" | "down":
            waiting = idle(snapshot, runner, now)
        case "ready" if refuses(snapshot, runner):
            waiting = behind(runner)
        case "started" if runner.waits_for and now - (runner.progressed or 0.0) > AWAITED_SECONDS:
            waiting = None if runner.leaving else idle(snapshot, runner, now)
        case "ready" if runner.loading is not None:
            wait_text = f" (it waits for {runner.waits_for})" if runner.waits_for else ""
    if waiting is not None:
        advice = waiting.way_out
        if waiting.cause == "failed" and runner.places:  # it served before, so its process ends and restarts
            advice = "it is started again"
        elif waiting.cause in ("lost", "loading"):
            advice = ""
        return waiting.text.removeprefix(f"{runner} ") + (f"; {advice}" if advice else "")
    is_loading = runner.state == "ready" and runner.loading is not None
    load_seconds = now - (runner.loading_since or now) if is_loading else 0.0
    if load_seconds > LOADING_SECONDS:
        return (f"has been loading weights version {runner.loading} for {span(load_seconds)}{wait_text}, and gets no "
                f"work meanwhile: see whether {runner.server or 'its engine'} is working, else "
                f"{restart_advice(runner.name, runner.server)}")
    if runner.trouble:
        return f"can't store what it finished, keeps it and tries again: {runner.trouble}"
    if (runner.silent or 0.0) > SILENT_SECONDS:
        return (f"is hung: its engine's loop has not answered for {span(runner.silent or 0.0)}; it is ended after "
                "system.hang_timeout and started again")
    return f"is up, and {runner.runs_wait}: see to that" if runner.runs_wait and runner.state == "ready" else None


def _state(snapshot: SystemSnapshot, runner: RunnerSnapshot, now: float) -> tuple[str, str, float | None, bool]:
    """Return (cause, text to follow the runner's name, start, whether it needs a person)."""
    since = runner.since
    ago = "" if since is None else f" {span(now - since)} ago"
    reason, wait = short(runner.reason), short(runner.waits_for)
    match runner.state:
        case "ready":
            since = snapshot.published_at
            ago = "" if since is None else f", published {span(now - since)} ago"
            text = f"is loading weights version {_loading(snapshot, runner)}{ago}; it has version "
            return "weights", f"{text}{runner.model_version}{f' and waits for {wait}' if wait else ''}", since, False
        case "failed":
            return "refused" if refuses(snapshot, runner) else "failed", f"failed{ago}: {reason}", since, True
        case "quarantined":
            return "quarantined", f"was quarantined{ago} and is not started again: {reason}", since, True
        case "lost":
            delay = "" if runner.restart_in is None else f" in {span(runner.restart_in)}"
            return "lost", f"was lost ({reason}) and is started again{delay}", since, False
        case "retired" | "down":
            return "ended", f"was ended{ago}", since, True
    text = f"{'waits to start' if wait else 'is loading'} its engine"
    text += ("" if since is None else f", for {span(now - since)} now") + (wait and f": {wait}")
    return "server" if wait and runner.server else "loading", text, since, False


def _waiting(runner: RunnerSnapshot, cause: str, text: str, since: float | None, person: bool) -> Waiting:
    """Return a `Waiting` for a runner. `text` follows its name."""
    return Waiting(
        cause=cause, what=str(runner), text=f"{runner} {text}", runner=runner.name, incarnation=runner.incarnation,
        since=since, seen=runner.seen, person=person, server=runner.server,
    )


def coordinator_away(child: Mapping[str, Any]) -> str:
    """Return why there is no coordinator and when it starts again. `child`: its row in the guardian's status."""
    delay, reason = child.get("restart_in"), short(child.get("reason") or "")
    start = "it is being started" if delay is None else f"it is started in {span(delay)}"
    cause = f" ({reason})" if reason else ""
    return f"there is no coordinator now{cause}: {start}"


def short(text: str, width: int = 300) -> str:
    """Return an error's text on one line of printable characters; a traceback is shortened by `split_error`."""
    message, frame = ("".join(c if c.isprintable() else " " for c in " ".join(part.split()))
                      for part in split_error(text))
    room = width - len(frame)
    if len(message) > room:
        message = message[: room - 1] + "…"
    return f"{message} {frame}" if frame else message
