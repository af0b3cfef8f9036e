"""The page of all weights versions and LoRA adapters, and the page of one weights version."""

from __future__ import annotations

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WeightNotFound
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS, adapter_history
from trinity_es.projections.tables.runner_history import WeightsLoad

__all__ = ["NAV", "ROUTES", "weights"]

PER_PAGE = 40
MAX_ADAPTER_EVENTS = 2000
"""Maximum number of events of LoRA adapters that the page reads, beginning with the newest."""
MAX_BATCHES = 200


def weights(request: PageRequest) -> Page:
    """Return the page `/weights` of the versions and the adapters, or with `?version=V` of one version."""
    if request.text("version"):
        return _version_page(request, request.number("version"))
    total, deliveries = request.log.count_weights(), request.log.deliveries_by_version()
    number, pages = request.page_number(total, PER_PAGE)
    versions = request.log.weights(limit=PER_PAGE, offset=(number - 1) * PER_PAGE)
    adapter_events = list(request.log.read_rare(ADAPTER_EVENTS, descending=True, limit=MAX_ADAPTER_EVENTS))
    adapters = adapter_history(reversed(adapter_events))
    return Page(
        template="weights.html", title="Weights", nav="weights", watch=("weights", "runner/", "batch/", "adapter/"),
        values={
            "versions": list(reversed(versions)), "total": total, "delivered": deliveries,
            "most": max(deliveries.values(), default=0), "page_number": number, "pages": pages,
            "adapters": list(reversed(adapters))[:PER_PAGE],
        },
    )


def _version_page(request: PageRequest, version: int) -> Page:
    """Return the page of one version: its loads by runners, and the batches that it made. Raises WeightNotFound."""
    published = next(iter(request.log.weights(version=version)), None)
    loads_at_start = [
        WeightsLoad(runner=r.event.runner, incarnation=r.event.incarnation, at=r.recorded_at,
                    seconds=r.event.load_seconds, error=None)
        for r in request.log.read_rare(["RunnerReady"])
        if isinstance(r.event, ev.RunnerReady) and r.event.model_version == version
    ]
    loads = [(load, "started with it") for load in loads_at_start]
    delays: list[float] = []  # seconds from the publication to each load
    if published is not None:
        delays = [load.at - published.published_at for load in published.loads]
        loads += [(load, "loaded it") for load in published.loads]
        loads += [(load, "failed to load it") for load in published.failures]
    loads.sort(key=lambda pair: pair[0].at)
    batches = request.log.batches_made_by(version, MAX_BATCHES)
    if published is None and not loads_at_start and not batches:
        raise WeightNotFound(f"there is no version {version} of the weights in {request.log.url}: the page /weights "
                             "lists all versions")
    return Page(
        template="weights_version.html", title=f"Weights version {version}", nav="weights",
        watch=("weights", "runner/"),
        values={
            "version": version, "published": published, "loads": loads,
            "count": request.log.deliveries_by_version().get(version, 0),
            "newest": max((w.version for w in request.log.weights(limit=1)), default=None),
            "batches": [(stream.removeprefix("batch/"), count) for stream, count in batches],
            "most": MAX_BATCHES,
            "lag": (min(delays), max(delays)) if delays else None,
        },
    )


NAV = [Nav(name="weights", title="Weights", path="/weights", key="w")]
ROUTES = [Route("/weights", weights)]
