"""Export of a batch as one HTML file: timeline, result, events and some rollouts.

The file's Content-Security-Policy allows only its own style sheet, by hash. So the file can't run, load or send
anything, whatever a rollout contains. Equal logs give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
from itertools import islice
from typing import Any

from markupsafe import Markup

from trinity_es.dashboard import gantt, rollout_values, tokens
from trinity_es.dashboard.rendering import HERE, render
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import RunRow, fold_timeline, select_runs
from trinity_es.projections.reading.log_reader import Log
from trinity_es.safe_text import summary

__all__ = ["batch_page"]

TASKS = 400
EVENTS = 800
ROLLOUTS = 24
"""Number of exported rollouts, half of them the best and half the worst by reward."""
EXPERIENCES_PER_RUN = 4
MAX_CHARACTERS = 4000
MAX_TOKENS = 400


def batch_page(log: Log, batch_id: BatchId) -> str:
    """Return the text of an HTML file that shows the batch as it is now. Raises BatchNotFound."""
    head = log.head()
    recorded = [r for r in log.events(batch_id) if r.position <= head.position]
    timeline = fold_timeline(recorded)
    decode, source = tokens.decoder(log.config()[1])
    shown = _best_and_worst(timeline.rows)
    details = []
    for row, result in zip(shown, rollout_values.read_runs(log, timeline, shown), strict=True):
        experiences = [rollout_values.experience_values(e, decode, source, max_characters=MAX_CHARACTERS,
                                                       max_tokens=MAX_TOKENS)
                       for e in islice(result.experiences, EXPERIENCES_PER_RUN)]
        details.append({"row": row, "experiences": experiences, "missing": result.missing,
                        "more": max(0, len(result.experiences) - EXPERIENCES_PER_RUN)})
    end = timeline.ended_at or timeline.last_at
    window = gantt.Window(timeline.submitted_at, max(end, timeline.submitted_at + 1e-3))
    style = "\n".join((HERE / "static" / name).read_text() for name in ("app.css", "rollouts.css", "export.css"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return render("export.html", {
        "style": Markup(style), "style_hash": digest, "head": head, "log_url": log.url, "row": log.batch_row(batch_id),
        "losses": sorted(log.losses(batch_id).items()), "rollouts": details, "runs": len(timeline.rows),
        **gantt.drawing(timeline, window, timeline.tasks[:TASKS]), "tasks_left": max(0, len(timeline.tasks) - TASKS),
        "metrics": sorted((timeline.state.final_result or {}).get("metrics", {}).items()),
        **_events(recorded, timeline.first_position),
    })


def _events(recorded: list[Recorded], first: int) -> dict[str, Any]:
    """Return the events since the batch's last submission for the template; of many, the first and the last ones."""
    events = [r for r in recorded if r.position >= first]
    left_out_count = max(0, len(events) - EVENTS)
    shown = events if not left_out_count else [*events[: EVENTS // 2], *events[-EVENTS // 2 :]]
    return {"events": [(r, summary(r.event)) for r in shown], "events_left": left_out_count, "events_cut": EVENTS // 2}


def _best_and_worst(rows: list[RunRow]) -> list[RunRow]:
    ordered = list(select_runs(rows, sort="reward"))
    return ordered if len(ordered) <= ROLLOUTS else [*ordered[: ROLLOUTS // 2], *ordered[-ROLLOUTS // 2 :]]
