"""Texts on problems of runners, for `why` and for a system's list of problems. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from trinity_es.events.errors import split_error
from trinity_es.projections.why.answer import Waiting, restart_advice, span
from trinity_es.projections.why.system_state import RunnerSnapshot, SystemSnapshot

__all__ = [
    "SILENT_SECONDS", "coordinator_absence", "gets_units", "has_no_server", "refuses_weights", "runner_problem",
    "short", "wait_for_idle_runner", "wait_for_outdated_runner",
]

SILENT_SECONDS = 10.0
"""A runner is silent after this time without a heartbeat (sent every 4 s) or an answer of its engine's loop."""
AWAITED_SECONDS = 10.0
"""A runner has a problem if its engine waits longer for something external, such as a server."""
LOADING_SECONDS = 300.0
"""A runner has a problem if it loads weights for longer. Nothing else notices a server that hangs in a load."""


def _version_in_load(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> int | None:
    """Return the weights version that a runner is loading, None if none, by the system's status or else by the log."""
    if runner.loading is not None:
        return runner.loading
    is_behind = snapshot.published_at is not None and runner.model_version != snapshot.weights
    return snapshot.weights if is_behind and not refuses_weights(snapshot, runner) else None


def refuses_weights(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> bool:
    """Return True if a runner failed to load the current weights, so that it keeps the previous ones."""
    return runner.refused is not None and runner.refused[0] == snapshot.weights


def gets_units(snapshot: SystemSnapshot, runner: RunnerSnapshot) -> bool:
    """Return True if a runner gets units: it is ready and loads no weights."""
    return runner.state == "ready" and _version_in_load(snapshot, runner) is None


def has_no_server(snapshot: SystemSnapshot, live: Mapping[str, Any] | None, gone: bool) -> bool:
    """Return True if engines are external servers and none is left, by the system's status or else by the log.

    `gone`: True if a server was removed.
    """
    servers = (live or {}).get("servers")
    return snapshot.of_servers and (gone if servers is None else not any(s["wanted"] for s in servers))


def wait_for_idle_runner(snapshot: SystemSnapshot, runner: RunnerSnapshot, now: float) -> Waiting:
    """Return the `Waiting` for a runner that gets no units in its state."""
    waiting = partial(_runner_wait, runner)
    since = runner.since
    ago = "" if since is None else f" {span(now - since)} ago"
    reason, wait = short(runner.reason), short(runner.waits_for)
    match runner.state:
        case "ready":
            since = snapshot.published_at
            ago = "" if since is None else f", published {span(now - since)} ago"
            text = f"is loading weights version {_version_in_load(snapshot, runner)}{ago}; it has version "
            text += f"{runner.model_version}{f' and waits for {wait}' if wait else ''}"
            return waiting("weights", text, since, person=False)
        case "failed":
            cause = "refused" if refuses_weights(snapshot, runner) else "failed"
            return waiting(cause, f"failed{ago}: {reason}", since, person=True)
        case "quarantined":
            text = f"was quarantined{ago} and is not started again: {reason}"
            return waiting("quarantined", text, since, person=True)
        case "lost":
            delay = "" if runner.restart_in is None else f" in {span(runner.restart_in)}"
            return waiting("lost", f"was lost ({reason}) and is started again{delay}", since, person=False)
        case "retired" | "down":
            return waiting("ended", f"was ended{ago}", since, person=True)
    text = f"{'waits to start' if wait else 'is loading'} its engine"
    text += ("" if since is None else f", for {span(now - since)} now") + (wait and f": {wait}")
    return waiting("server" if wait and runner.server else "loading", text, since, person=False)


def wait_for_outdated_runner(runner: RunnerSnapshot) -> Waiting:
    """Return the `Waiting` for a runner that keeps old weights because it could not load the current ones."""
    version, error = runner.refused or (None, "")
    text = f"goes on with weights version {runner.model_version}: it can't load version {version}: {short(error)}"
    return _runner_wait(runner, "refused", text, None, person=False)


def runner_problem(snapshot: SystemSnapshot, runner: RunnerSnapshot, now: float) -> str | None:
    """Return a runner's problem and what to do, as text that follows the runner's name; None if it has none."""
    waiting: Waiting | None = None
    wait_text = ""
    match runner.state:
        case "retired":
            return None
        case "failed" | "quarantined" | "lost" | "down":
            waiting = wait_for_idle_runner(snapshot, runner, now)
        case "ready" if refuses_weights(snapshot, runner):
            waiting = wait_for_outdated_runner(runner)
        case "started" if runner.waits_for and now - (runner.progressed or 0.0) > AWAITED_SECONDS:
            waiting = None if runner.leaving else wait_for_idle_runner(snapshot, runner, now)
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


def _runner_wait(runner: RunnerSnapshot, cause: str, text: str, since: float | None, person: bool) -> Waiting:
    """Return a `Waiting` for a runner. `text` follows the runner's name."""
    return Waiting(
        cause=cause, what=str(runner), text=f"{runner} {text}", runner=runner.name, incarnation=runner.incarnation,
        since=since, seen=runner.seen, person=person, server=runner.server,
    )


def coordinator_absence(child: Mapping[str, Any]) -> str:
    """Describe why there is no coordinator and when it starts. `child`: its row in the guardian's status."""
    delay, reason = child.get("restart_in"), short(child.get("reason") or "")
    start = "it is being started" if delay is None else f"it is started in {span(delay)}"
    cause = f" ({reason})" if reason else ""
    return f"there is no coordinator now{cause}: {start}"


def short(text: str, width: int = 300) -> str:
    """Return an error's text on one line of printable characters, with only the last frame of a traceback."""
    message, frame = ("".join(c if c.isprintable() else " " for c in " ".join(part.split()))
                      for part in split_error(text))
    room = width - len(frame)
    if len(message) > room:
        message = message[: room - 1] + "…"
    return f"{message} {frame}" if frame else message
