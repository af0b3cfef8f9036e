"""The page of all events, the newest first."""

from __future__ import annotations

from itertools import takewhile

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route, link, runner_url
from trinity_es.safe_text import summary

__all__ = ["NAV", "ROUTES", "events", "subject_url"]

EVENTS_PER_PAGE = 200


def subject_url(stream: str) -> str | None:
    """Return the URL of the page about a stream's batch or runner, or about the weights; None for other streams."""
    kind, _, name = stream.partition("/")
    if kind == "batch":
        return link("/batch", id=name)
    if kind == "runner":
        return runner_url(name)
    return "/weights" if kind == "weights" else None


def events(request: PageRequest) -> Page:
    """Return the page `/events`. With `kind=rare`, events of single tasks are left out.

    With `before=POSITION` it shows the events before that position. Otherwise it shows the log's end and is updated.
    """
    rare = request.choice("kind", ("all", "rare"), "all") == "rare"
    before = request.number("before", request.position + 1, low=1, high=request.position + 1)
    if rare:
        rows = list(request.log.read_rare(before=before, limit=EVENTS_PER_PAGE, descending=True))
    else:
        page_events = request.log.read(after=max(0, before - 1 - EVENTS_PER_PAGE)) if before > 1 else ()
        rows = list(takewhile(lambda recorded: recorded.position < before, page_events))[::-1]
    has_older = bool(rows) and rows[-1].position > 1 and (len(rows) == EVENTS_PER_PAGE or not rare)
    return Page(
        template="events.html", title="Events", nav="events", watch=() if "before" in request.query else None,
        values={
            "rows": [(r, subject_url(r.stream), summary(r.event)) for r in rows], "rare": rare,
            "older": rows[-1].position if has_older else None,
            "at_end": "before" not in request.query,
        },
    )


NAV = [Nav(name="events", title="Events", path="/events", key="e")]
ROUTES = [Route("/events", events)]
