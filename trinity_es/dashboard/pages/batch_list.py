"""The list of batches."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route

__all__ = ["NAV", "ROUTES", "batches"]

BATCHES_PER_PAGE = 100
STATES = ("pending", "running", "finalizing", "finalized", "aborted")
TYPES = ("train", "eval", "collect")


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the list of batches."""

    title: str
    sort: str = ""
    """Value of the URL parameter `sort` for this column."""
    right: bool = True
    """True if the heading is aligned on the right, above numbers."""
    hint: str = ""


COLUMNS = (
    Column("batch", "position", False, "in the order of submission"),
    Column("type", "type", False),
    Column("state", "state", False),
    Column("tasks", "tasks", False, "finished, failed and dropped of all"),
    Column("failed attempts", "failed_attempts"),
    Column("experiences", "experiences"),
    Column("reward", "reward", hint="mean of the batch; in brackets the number of tasks with missing runs"),
    Column("tokens", "response_tokens", hint="response tokens"),
    Column("version", "model_version", hint="the newest weights that made any of its tokens"),
    Column("behind", "staleness", hint="weights versions behind the newest when it was finalized"),
    Column("step", "step", hint="the step that trained on it"),
    Column("submitted", "submitted"),
    Column("seconds", "seconds", hint="from submission to end"),
)
_SORTS = tuple(c.sort for c in COLUMNS)


def batches(request: PageRequest) -> Page:
    """Return the page `/batches`; by default the newest batches come first."""
    state, batch_type = request.choice("state", STATES) or None, request.choice("type", TYPES) or None
    sort = request.choice("sort", _SORTS, "position")
    descending = request.choice("order", ("up", "down"), "down") == "down"
    total = request.log.count_batches(state=state, batch_type=batch_type)
    number, pages = request.page_number(total, BATCHES_PER_PAGE)
    rows = request.log.batches(
        state=state, batch_type=batch_type, sort=sort, descending=descending, limit=BATCHES_PER_PAGE,
        offset=(number - 1) * BATCHES_PER_PAGE,
    )
    unfiltered_total = request.log.count_batches() if state or batch_type else total
    return Page(
        template="batches.html", title="Batches", nav="batches", watch=("batch/",),
        values={
            "rows": rows, "total": total, "everything": unfiltered_total, "pages": pages, "number": number,
            "state": state, "type": batch_type, "sort": sort, "descending": descending, "columns": COLUMNS,
            "states": STATES, "types": TYPES,
        },
    )


NAV = [Nav(name="batches", title="Batches", path="/batches", key="b")]
ROUTES = [Route("/batches", batches)]
