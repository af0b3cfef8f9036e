"""Two replays side by side: two batches, or one batch at two moments, of one log or of two."""

from __future__ import annotations

from trinity_es.dashboard.comparison import Comparison, Side, compare, side
from trinity_es.dashboard.page import Nav, Page, PageRequest, Route, batch_of, batch_ref
from trinity_es.events.errors import DataError, TrinityError
from trinity_es.projections.reading.log_reader import Log

__all__ = ["NAV", "ROUTES", "comparison"]

TASKS = 200
"""Tasks that a page shows of each side."""


def comparison(ask: PageRequest) -> Page:
    """`/compare?id=A&at=P&id2=B&at2=Q`; without a second batch the first. `in=other`: the second is of the other log.
    """
    found: Comparison | None = None
    trouble = ""
    elsewhere = ask.other is not None and ask.choice("in", ("this", "other"), "other") == "other"
    if ask.text("id"):
        try:
            log = ask.other() if elsewhere and ask.other is not None else ask.log
            found = compare(_side(ask.log, ask.text("id"), ask.text("at")),
                            _side(log, ask.text("id2") or ask.text("id"), ask.text("at2")))
        except TrinityError as e:
            trouble = e.message
    only = ask.choice("show", ("differing", "all"), "differing")
    tasks = [] if found is None else [p for p in found.tasks if p.differs or only == "all"]
    return Page(
        template="compare.html", title="Compare", nav="compare", watch=(),
        values={
            "found": found, "trouble": trouble, "tasks": tasks[:TASKS], "tasks_left": max(0, len(tasks) - TASKS),
            "show": only, "two": ask.other is not None, "elsewhere": elsewhere,
            "ids": (ask.text("id"), ask.text("id2")), "ats": (ask.text("at"), ask.text("at2")),
            "known": [batch_ref(row.batch_id) for row in
                      ask.log.batches(sort="position", descending=True, limit=200)],
        },
    )


def _side(log: Log, ref: str, at: str) -> Side:
    batch_id = batch_of(log, ref.strip())
    if not at.strip():
        return side(log, batch_id)
    if not (at.strip().isdecimal() and at.isascii() and len(at.strip()) < 20):
        raise DataError(f"{at[:40]!r} is no position of the log: a number, as in the list of events")
    return side(log, batch_id, int(at))


NAV = [Nav(name="compare", title="Compare", path="/compare", key="c")]
ROUTES = [Route("/compare", comparison)]
