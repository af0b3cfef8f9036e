"""The list of batches."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route

__all__ = ["NAV", "ROUTES", "batches"]

SIZE = 100
STATES = ("pending", "running", "finalizing", "finalized", "aborted")
TYPES = ("train", "eval", "collect")


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    sort: str = ""
    right: bool = True
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
    """Return the page `/batches`, by default the newest first."""
    state, kind = request.choice("state", STATES), request.choice("type", TYPES)
    sort = request.choice("sort", _SORTS, "position")
    descending = request.choice("order", ("up", "down"), "down") == "down"
    total = request.log.count_batches(state=state or None, batch_type=kind or None)
    number, pages = request.page_of(total, SIZE)
    rows = request.log.batches(
        state=state or None, batch_type=kind or None, sort=sort, descending=descending, limit=SIZE,
        offset=(number - 1) * SIZE,
    )
    everything = total if not (state or kind) else request.log.count_batches()
    return Page(
        template="batches.html", title="Batches", nav="batches", watch=("batch/",),
        values={
            "rows": rows, "total": total, "everything": everything, "pages": pages, "number": number, "state": state,
            "type": kind, "sort": sort, "descending": descending, "columns": COLUMNS, "states": STATES, "types": TYPES,
        },
    )


NAV = [Nav(name="batches", title="Batches", path="/batches", key="b")]
ROUTES = [Route("/batches", batches)]
