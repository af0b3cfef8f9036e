"""What runners do right now: told by each runner when it is asked, gathered by the coordinator with a deadline.

A runner's state is plain JSON: `runner, incarnation, model, state, model_version` (that its engine serves),
`answered` (false: it did not say so in time, and this is what the coordinator knows), `units` (that it has), `running`:
a row for each run that plays now (`workflow_id` "batch/task/run", `runs` where a workflow does several itself,
`model_version` at its begin, `begin_time` in unix seconds, `running_time` in seconds), the longest first and
`SHOWN_RUNS` at most, and `running_count`, all of them. `workflow_id, begin_time, end_time, running_time` are those of
the run that has played longest (`end_time` null), or, where none plays, of the last one that ended; null before any.
`terminate_time` is another name of `end_time`; `workflow_state` is what that run's workflow told by
`model.set_workflow_state`. A `waits_for` in it says for what outside of the system a run waits: `why` and `status`
tell it.

None of it is in the log: it is what nobody has decided or finished yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trinity_es.events.store.records.clock import steady_clock

__all__ = ["SHOWN_RUNS", "RunActivity", "runner_state", "table"]

SHOWN_RUNS = 64
"""Rows that a runner tells at most: its state travels in a message."""

Row = dict[str, Any]


class RunActivity:
    """The runs that play now, and the one that ended last. Written on one thread, read from any."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives unix seconds; by default one that no step of the machine's moves."""
        self.clock = clock or steady_clock()
        self.last: Row | None = None
        self._running: dict[int, Row] = {}
        self._number = 0

    @contextmanager
    def shown(self, workflow_id: str, runs: int, model_version: int) -> Iterator[Row]:
        """Show a run (or the first of several) for as long as it plays. What is put into its row is shown with it."""
        self._number += 1
        number = self._number  # not its id: an attempt may begin before the last one has ended
        row: Row = {
            "workflow_id": workflow_id, "runs": runs, "model_version": model_version, "begin_time": self.clock(),
        }
        self._running[number] = row
        try:
            yield row
        finally:
            del self._running[number]
            self.last = {**row, "end_time": self.clock()}

    def waits(self) -> str:
        """Return how many runs wait for something outside of the system, and for what, as the longest tells it.

        A workflow tells it by `waits_for` in its state, in words; empty: none waits.
        """
        rows = list(self._running.values())  # a copy: another thread writes it
        rows.sort(key=lambda row: row["begin_time"])
        told = [said for row in rows if isinstance(said := row.get("state", {}).get("waits_for"), str) and said]
        if not told:
            return ""
        how_many = "1 of its runs waits" if len(told) == 1 else f"{len(told)} of its runs wait"
        return f"{how_many} for {told[0][:300]}"

    def running(self) -> list[Row]:
        """Return the runs that play, the longest first."""
        now = self.clock()
        rows = [{**row, "running_time": max(0.0, now - row["begin_time"])} for row in list(self._running.values())]
        return sorted(rows, key=lambda row: -row["running_time"])


def runner_state(played: RunActivity | None, **known: Any) -> dict[str, Any]:
    """Return a runner's state (see the module): what is known of it, and of what it plays.

    `played` None: nobody told.
    """
    running = [] if played is None else played.running()
    last = None if played is None else played.last
    row: Row = {"workflow_id": None, "begin_time": None, "end_time": None, "running_time": None}
    shown: Row = running[0] if running else last or {}
    if running:
        row |= {key: running[0][key] for key in ("workflow_id", "begin_time", "running_time")}
    elif last is not None:
        row |= {key: last[key] for key in ("workflow_id", "begin_time", "end_time")}
        row["running_time"] = max(0.0, last["end_time"] - last["begin_time"])
    row |= {"terminate_time": row["end_time"], "workflow_state": dict(shown.get("state", {}))}
    rows = [{key: value for key, value in r.items() if key != "state"} for r in running[:SHOWN_RUNS]]
    told = {"answered": played is not None, "running_count": len(running), "running": rows}
    return {**known, **row, **told}


def table(states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the states of runners for a person, a line each."""
    head = ("runner", "model", "state", "version", "units", "playing", "longest", "for s")
    rows = [head]
    for name in sorted(states):
        state = states[name]
        playing = bool(state["running"])
        seconds = f"{state['running_time']:.1f}" if playing else "-"
        said = state["state"] if state["answered"] else f"{state['state']}, silent"
        rows.append((
            name, state["model"], said, str(state["model_version"]), str(state["units"]),
            str(state["running_count"]), state["workflow_id"] if playing else "-", seconds,
        ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
