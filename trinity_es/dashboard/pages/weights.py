"""The pages of all versions of the weights, with the LoRA adapters, and of one version."""

from __future__ import annotations

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WeightNotFound
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS, adapter_history
from trinity_es.projections.tables.runner_history import WeightsLoad, WeightsVersion

__all__ = ["NAV", "ROUTES", "weights"]

PER_PAGE = 40
ADAPTER_EVENTS_READ = 2000
"""Maximum number of events of LoRA adapters that the page reads, the newest ones."""
BATCHES = 200
"""Maximum number of batches on the page of one version."""


def weights(request: PageRequest) -> Page:
    """Return the page `/weights` of all versions, the newest first, or with `?version=V` of one."""
    if request.text("version"):
        return _version_page(request, request.number("version"))
    total, deliveries = request.log.count_weights(), request.log.deliveries_by_version()
    number, pages = request.page_of(total, PER_PAGE)
    versions = request.log.weights(limit=PER_PAGE, offset=(number - 1) * PER_PAGE)
    newest = list(request.log.rare(ADAPTER_EVENTS, descending=True, limit=ADAPTER_EVENTS_READ))
    adapters = adapter_history(reversed(newest))
    return Page(
        template="weights.html", title="Weights", nav="weights", watch=("weights", "runner/", "batch/", "adapter/"),
        values={
            "versions": list(reversed(versions)), "total": total, "delivered": deliveries,
            "most": max(deliveries.values(), default=0), "page_number": number, "pages": pages,
            "adapters": list(reversed(adapters))[:PER_PAGE],
        },
    )


def _version_page(request: PageRequest, number: int) -> Page:
    published = next(iter(request.log.weights(version=number)), None)
    ready = [
        WeightsLoad(runner=r.event.runner, incarnation=r.event.incarnation, at=r.recorded_at,
             seconds=r.event.load_seconds, error=None)
        for r in request.log.rare(["RunnerReady"])
        if isinstance(r.event, ev.RunnerReady) and r.event.model_version == number
    ]
    loads = [(load, "started with it") for load in ready]
    if published is not None:
        loads += [(load, "loaded it") for load in published.loads]
        loads += [(load, "failed to load it") for load in published.failures]
    loads.sort(key=lambda pair: pair[0].at)
    batches = request.log.batches_made_by(number, BATCHES)
    if published is None and not ready and not batches:
        raise WeightNotFound(f"no version {number} of the weights in {request.log.url}")
    return Page(
        template="weights_version.html", title=f"Weights version {number}", nav="weights",
        watch=("weights", "runner/"),
        values={
            "version": number, "published": published, "loads": loads,
            "count": request.log.deliveries_by_version().get(number, 0),
            "newest": max((v.version for v in request.log.weights(limit=1)), default=None),
            "batches": [(stream.removeprefix("batch/"), count) for stream, count in batches], "most": BATCHES,
            "lag": _lag(published) if published is not None else None,
        },
    )


def _lag(version: WeightsVersion) -> tuple[float, float] | None:
    """Return the seconds from the publication until the first and the last engine had loaded it."""
    after = [load.at - version.published_at for load in version.loads]
    return (min(after), max(after)) if after else None


NAV = [Nav(name="weights", title="Weights", path="/weights", key="w")]
ROUTES = [Route("/weights", weights)]
