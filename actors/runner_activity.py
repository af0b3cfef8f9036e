"""Current activity of the runners: each reports its own, and the coordinator gathers the reports with a deadline.

A runner's state is plain JSON, and is never written to the log. Its keys:

- `runner, incarnation, model, state, model_version` (the version that its engine serves), `units` (number assigned).
- `answered`: false if the runner missed the deadline; then the coordinator fills in what it knows.
- `running`: at most `SHOWN_RUNS` rows, the longest-running first, one for each run that plays now. A row has
  `workflow_id` "batch/task/run", `runs` (number of runs, if one call of a workflow plays several), `model_version` at
  its start, `begin_time` in unix seconds, `running_time` in seconds. `running_count` counts all of them.
- `workflow_id, begin_time, end_time, running_time`: the run that has played longest (`end_time` null). If none plays,
  the last run that ended; null before any. `terminate_time` is another name of `end_time`.
- `workflow_state`: what the same run's workflow set by `model.set_workflow_state`. The key `waits_for` in it names what
  the run waits for outside of the system; `why` and `status` show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trinity_es.events.store.records.clock import steady_clock

__all__ = ["SHOWN_RUNS", "RunActivity", "runner_state", "states_table"]

SHOWN_RUNS = 64
"""Maximum number of rows in a runner's state, which travels in a message."""

Row = dict[str, Any]


class RunActivity:
    """The runs that play now, and the last one that ended. One thread writes it, any may read it."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns unix seconds; the default one does not jump if the machine's clock is set."""
        self.clock = clock or steady_clock()
        self.last: Row | None = None
        self._running: dict[int, Row] = {}
        self._number = 0

    @contextmanager
    def show(self, workflow_id: str, runs: int, model_version: int) -> Iterator[Row]:
        """List a run (or the first of several) as running within the `with` block. Yields its row, for additions."""
        self._number += 1
        number = self._number  # not the run's id: an attempt may begin before the last one has ended
        row: Row = {
            "workflow_id": workflow_id, "runs": runs, "model_version": model_version, "begin_time": self.clock(),
        }
        self._running[number] = row
        try:
            yield row
        finally:
            del self._running[number]
            ended = self.clock()
            self.last = {**row, "end_time": ended, "running_time": max(0.0, ended - row["begin_time"])}

    def waiting_text(self) -> str:
        """Return a phrase such as "2 of its runs wait for X", or "" if no run waits for anything outside of the system.

        A run waits if its workflow's state has a text `waits_for`. X is that text of the waiting run that began first.
        """
        rows = list(self._running.values())  # a copy, since another thread changes the dict
        rows.sort(key=lambda row: row["begin_time"])
        values = [row.get("state", {}).get("waits_for") for row in rows]
        texts = [value for value in values if isinstance(value, str) and value]
        if not texts:
            return ""
        runs_wait = "1 of its runs waits" if len(texts) == 1 else f"{len(texts)} of its runs wait"
        return f"{runs_wait} for {texts[0][:300]}"

    def running(self) -> list[Row]:
        """Return the runs that play, the longest first."""
        now = self.clock()
        rows = [{**row, "running_time": max(0.0, now - row["begin_time"])} for row in list(self._running.values())]
        return sorted(rows, key=lambda row: -row["running_time"])


def runner_state(activity: RunActivity | None, **fields: Any) -> dict[str, Any]:
    """Return a runner's state as the module docs describe it: `fields`, and keys about its runs. `activity` is None if
    the runner did not answer."""
    running = [] if activity is None else activity.running()
    last = None if activity is None else activity.last
    shown = running[0] if running else last or {}
    run: Row = {key: shown.get(key) for key in ("workflow_id", "begin_time", "end_time", "running_time")}
    run |= {"terminate_time": run["end_time"], "workflow_state": dict(shown.get("state", {}))}
    rows = [{key: value for key, value in row.items() if key != "state"} for row in running[:SHOWN_RUNS]]
    runs = {"answered": activity is not None, "running_count": len(running), "running": rows}
    return {**fields, **run, **runs}


def states_table(states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the states of runners as a table for people, one line each."""
    headings = ("runner", "model", "state", "version", "units", "playing", "longest", "for s")
    rows = [headings]
    for name in sorted(states):
        state = states[name]
        has_runs = bool(state["running"])
        seconds = f"{state['running_time']:.1f}" if has_runs else "-"
        label = state["state"] if state["answered"] else f"{state['state']}, silent"
        rows.append((
            name, state["model"], label, str(state["model_version"]), str(state["units"]),
            str(state["running_count"]), state["workflow_id"] if has_runs else "-", seconds,
        ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(headings))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
