"""Versions of the weights: when each was published, when each engine had it, how much of what was delivered it made."""

from __future__ import annotations

from trinity_es.dashboard.page import Nav, Page, PageRequest, Route
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WeightNotFound
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS, adapter_history
from trinity_es.projections.tables.runner_history import WeightsLoad, WeightsVersion

__all__ = ["NAV", "ROUTES", "weights"]

PER_PAGE = 40
ADAPTER_EVENTS_READ = 2000
"""Events of LoRA adapters that a page reads, the newest."""
BATCHES = 200
"""Batches that a page about one version names."""


def weights(ask: PageRequest) -> Page:
    """`/weights`: every version, the newest first; `?version=V`: one of them."""
    if ask.text("version"):
        return _version(ask, ask.number("version"))
    total, made = ask.log.count_weights(), ask.log.made()
    number, pages = ask.page_of(total, PER_PAGE)
    versions = ask.log.weights(limit=PER_PAGE, offset=(number - 1) * PER_PAGE)
    newest = list(ask.log.rare(ADAPTER_EVENTS, descending=True, limit=ADAPTER_EVENTS_READ))
    adapters = adapter_history(reversed(newest))
    return Page(
        template="weights.html", title="Weights", nav="weights", watch=("weights", "runner/", "batch/", "adapter/"),
        values={
            "versions": list(reversed(versions)), "total": total, "delivered": made,
            "most": max(made.values(), default=0), "page_number": number, "pages": pages,
            "adapters": list(reversed(adapters))[:PER_PAGE],
        },
    )


def _version(ask: PageRequest, number: int) -> Page:
    found = next(iter(ask.log.weights(version=number)), None)
    ready = [
        WeightsLoad(runner=r.event.runner, incarnation=r.event.incarnation, at=r.recorded_at,
             seconds=r.event.load_seconds, error=None)
        for r in ask.log.rare(["RunnerReady"])
        if isinstance(r.event, ev.RunnerReady) and r.event.model_version == number
    ]
    had = [(load, "came up with it") for load in ready]
    if found is not None:
        had += [(load, "loaded it") for load in found.loads] + [(load, "could not") for load in found.failures]
    had.sort(key=lambda pair: pair[0].at)
    batches = ask.log.batches_made_by(number, BATCHES)
    if found is None and not ready and not batches:
        raise WeightNotFound(f"no version {number} of the weights in {ask.log.url}")
    return Page(
        template="weights_version.html", title=f"Weights version {number}", nav="weights",
        watch=("weights", "runner/"),
        values={
            "version": number, "found": found, "had": had, "count": ask.log.made().get(number, 0),
            "newest": max((v.version for v in ask.log.weights(limit=1)), default=None),
            "batches": [(stream.removeprefix("batch/"), count) for stream, count in batches], "most": BATCHES,
            "lag": _lag(found) if found is not None else None,
        },
    )


def _lag(version: WeightsVersion) -> tuple[float, float] | None:
    """Return seconds from the publication until the first and the last engine had it."""
    after = [load.at - version.published_at for load in version.loads]
    return (min(after), max(after)) if after else None


NAV = [Nav(name="weights", title="Weights", path="/weights", key="w")]
ROUTES = [Route("/weights", weights)]
