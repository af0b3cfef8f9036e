"""The log itself: its events, the newest first."""

from __future__ import annotations

from trinity_es.dashboard.page import Nav, Page, PageRequest, Route, link, runner_url
from trinity_es.text import summary

__all__ = ["NAV", "ROUTES", "events", "where"]

SIZE = 200


def where(stream: str) -> str | None:
    """Return the page that shows what a stream is of; None where there is none."""
    room, _, name = stream.partition("/")
    if room == "batch":
        return link("/batch", id=name)
    if room == "runner":
        return runner_url(name)
    return "/weights" if room == "weights" else None


def events(ask: PageRequest) -> Page:
    """Return all, or those that are no course of tasks. Without `before` it begins at the log's end, and is live."""
    rare = ask.choice("kind", ("all", "rare"), "all") == "rare"
    before = ask.number("before", ask.position + 1, low=1, high=ask.position + 1)
    if rare:
        found = list(ask.log.rare(before=before, limit=SIZE, descending=True))
    else:
        first = max(0, before - 1 - SIZE)
        found = []
        for recorded in ask.log.read(after=first) if before > 1 else ():
            if recorded.position >= before:
                break
            found.append(recorded)
        found.reverse()
    older = found[-1].position if found and found[-1].position > 1 and (len(found) == SIZE or not rare) else None
    return Page(
        template="events.html", title="Events", nav="events", watch=() if "before" in ask.query else None,
        values={
            "rows": [(r, where(r.stream), summary(r.event)) for r in found], "rare": rare, "older": older,
            "at_end": "before" not in ask.query,
        },
    )


NAV = [Nav(name="events", title="Events", path="/events", key="e")]
ROUTES = [Route("/events", events)]
