"""The pages of the dashboard. To add one:

1. a module here, with `ROUTES = [Route("/runner", runner)]`, a function that makes a `Page` of a `PageRequest`, and
   `NAV = [Nav(name="runners", title="Runners", path="/runners", key="n")]` if it stands in the navigation;
2. a template in `templates/`: `{% extends "base.html" %}`, its content in `{% block main %}`; what stands inside
   `<div id="live">` is made again while the log grows, without a reload (`Page.watch` says for which streams). A table
   whose rows have `data-href` and `data-key` is walked with j, k and enter (class "rows"). Never `|safe`, no inline
   script or style: the headers forbid them;
3. the module's name in `MODULES`, in the order of the navigation;
4. a test in tests/dashboard/.
"""

from __future__ import annotations

from importlib import import_module

from trinity_es.dashboard.page import Nav, Route

__all__ = ["MODULES", "navigation", "routes"]

MODULES = ["overview", "batch_list", "batch", "rollouts", "runners", "weights", "compare", "events"]


def routes() -> list[Route]:
    return [route for name in MODULES for route in import_module(f"{__name__}.{name}").ROUTES]


def navigation() -> list[Nav]:
    return [nav for name in MODULES for nav in getattr(import_module(f"{__name__}.{name}"), "NAV", [])]
