"""The run at a glance: how well it goes, how fast, what it waits for, who works."""

from __future__ import annotations

from trinity_es.dashboard.page import Ask, Nav, Page, Route

__all__ = ["NAV", "ROUTES", "overview"]


def overview(ask: Ask) -> Page:
    """Everything of it is live."""
    return Page(template="overview.html", title="Overview", nav="overview", values={})


NAV = [Nav(name="overview", title="Overview", path="/", key="o")]
ROUTES = [Route("/", overview)]
