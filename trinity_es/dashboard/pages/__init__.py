"""The pages of the dashboard. To add a page, write:

1. a module here, with `ROUTES = [Route("/runner", runner)]`, a function from `PageRequest` to `Page`, and for an entry
   in the navigation `NAV = [Nav(name="runners", title="Runners", path="/runners", key="n")]`;
2. a template in `templates/` with `{% extends "base.html" %}` and its content in `{% block main %}`. The content of
   `<div id="live">` is reloaded when the streams in `Page.watch` get events. The keys j, k and enter work in a table of
   class "rows" whose rows have `data-href` and `data-key`. Don't use `|safe`, and no inline script or style, which the
   headers forbid;
3. the module's name in `MODULES`, in the order of the navigation;
4. a test in tests/full/dashboard/.
"""

from __future__ import annotations

from importlib import import_module

from trinity_es.dashboard.page_urls import Nav, Route

__all__ = ["MODULES", "navigation", "routes"]

MODULES = ["overview", "batch_list", "batch", "rollouts", "runners", "weights", "compare", "events"]


def routes() -> list[Route]:
    return [route for name in MODULES for route in import_module(f"{__name__}.{name}").ROUTES]


def navigation() -> list[Nav]:
    return [nav for name in MODULES for nav in getattr(import_module(f"{__name__}.{name}"), "NAV", [])]
