"""Versions of the weights: when each was published, when each engine had it, how much of what was delivered it made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import orjson

from events import vocabulary as ev
from events.errors import WeightNotFound
from events.values import BatchId
from projections.lives import Load, WeightsVersion
from trinity_es.dashboard.page import Ask, Nav, Page, Route

__all__ = ["NAV", "ROUTES", "Delivered", "weights"]

PER_PAGE = 40
BATCHES = 200
"""Batches that a page about one version names."""


@dataclass(slots=True)
class Delivered:
    """Experiences that were delivered, by the version that made them: a fold of every BatchFinalized."""

    position: int = 0
    hash: bytes = b""
    """Of the event there: another one stands there when the log was put back to a copy."""
    by_version: Counter[int] = field(default_factory=Counter)
    batches: dict[int, list[tuple[BatchId, int]]] = field(default_factory=dict)
    """Version -> (batch, how many), the newest last, at most BATCHES."""


def _delivered(ask: Ask) -> Delivered:
    """Folded once, and then what is new."""
    known: Delivered = ask.kept.get("delivered") or Delivered()
    last = ask.log.at(known.position)
    if known.position and (last is None or last.hash != known.hash):
        known = Delivered()
    kept = {v: list(b) for v, b in known.batches.items()}
    found = Delivered(known.position, known.hash, known.by_version.copy(), kept)
    for recorded in ask.log.rare(["BatchFinalized"], after=known.position):
        said = orjson.loads(recorded.data)
        here: Counter[int] = Counter()
        for count, version in said.get("model_versions", ()):
            here[version] += count
        name = recorded.stream.removeprefix("batch/")
        for version, count in here.items():
            found.by_version[version] += count
            batches = found.batches.setdefault(version, [])
            batches.append((name, count))
            del batches[:-BATCHES]
        found.position, found.hash = recorded.position, recorded.hash
    ask.kept["delivered"] = found
    return found


def _versions(ask: Ask) -> list[WeightsVersion]:
    """All of them; read again when the log grew."""
    head = ask.log.head()
    known: tuple[bytes, list[WeightsVersion]] | None = ask.kept.get("weights")
    if known is None or known[0] != head.hash:
        known = head.hash, ask.log.weights()
        ask.kept["weights"] = known
    return known[1]


def weights(ask: Ask) -> Page:
    """`/weights`: every version, the newest first; `?version=V`: one of them."""
    if ask.text("version"):
        return _version(ask, ask.number("version"))
    versions = list(reversed(_versions(ask)))
    delivered = _delivered(ask)
    pages = max(1, -(-len(versions) // PER_PAGE))
    number = min(ask.number("page", 1, low=1), pages)
    return Page(
        template="weights.html", title="weights", nav="weights", watch=("weights", "runner/", "batch/"),
        values={
            "versions": versions[(number - 1) * PER_PAGE : number * PER_PAGE], "total": len(versions),
            "delivered": delivered.by_version, "most": max(delivered.by_version.values(), default=0),
            "page_number": number, "pages": pages,
        },
    )


def _version(ask: Ask, number: int) -> Page:
    """One version: who had it when."""
    versions = _versions(ask)
    found = next((v for v in versions if v.version == number), None)
    ready = [
        Load(runner=r.event.runner, incarnation=r.event.incarnation, at=r.recorded_at,
             seconds=r.event.load_seconds, error=None)
        for r in ask.log.rare(["RunnerReady"])
        if isinstance(r.event, ev.RunnerReady) and r.event.model_version == number
    ]
    had = [(load, "came up with it") for load in ready]
    if found is not None:
        had += [(load, "loaded it") for load in found.loads] + [(load, "could not") for load in found.failures]
    had.sort(key=lambda pair: pair[0].at)
    delivered = _delivered(ask)
    if found is None and not ready and number not in delivered.by_version:
        raise WeightNotFound(f"no version {number} of the weights in {ask.log.url}")
    return Page(
        template="weights_version.html", title=f"weights version {number}", nav="weights",
        watch=("weights", "runner/"),
        values={
            "version": number, "found": found, "had": had, "count": delivered.by_version[number],
            "newest": max((v.version for v in versions), default=None),
            "batches": list(reversed(delivered.batches.get(number, []))), "most": BATCHES,
            "lag": _lag(found) if found is not None else None,
        },
    )


def _lag(version: WeightsVersion) -> tuple[float, float] | None:
    """Seconds from the publication until the first and the last engine had it."""
    after = [load.at - version.published_at for load in version.loads]
    return (min(after), max(after)) if after else None


NAV = [Nav(name="weights", title="Weights", path="/weights", key="w")]
ROUTES = [Route("/weights", weights)]
