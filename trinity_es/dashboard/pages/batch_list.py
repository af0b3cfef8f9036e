"""The list of batches: filtered, sorted, in pages."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.dashboard.page import Nav, Page, PageRequest, Route

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
    Column("reward", "reward", hint="mean of the batch; in brackets, of how many of its tasks runs are missing in it"),
    Column("tokens", "response_tokens", hint="response tokens"),
    Column("version", "model_version", hint="the newest weights that made any of its tokens"),
    Column("behind", "staleness", hint="weights versions that it was behind when it was finalized"),
    Column("step", "step", hint="the step that it was trained in"),
    Column("submitted", "submitted"),
    Column("seconds", "seconds", hint="from submission to end"),
)
_SORTS = tuple(c.sort for c in COLUMNS)


def batches(ask: PageRequest) -> Page:
    """Newest first, unless another order is asked for."""
    state, kind = ask.choice("state", STATES), ask.choice("type", TYPES)
    sort = ask.choice("sort", _SORTS, "position")
    descending = ask.choice("order", ("up", "down"), "down") == "down"
    total = ask.log.count_batches(state=state or None, batch_type=kind or None)
    number, pages = ask.page_of(total, SIZE)
    rows = ask.log.batches(
        state=state or None, batch_type=kind or None, sort=sort, descending=descending, limit=SIZE,
        offset=(number - 1) * SIZE,
    )
    everything = total if not (state or kind) else ask.log.count_batches()
    return Page(
        template="batches.html", title="Batches", nav="batches", watch=("batch/",),
        values={
            "rows": rows, "total": total, "everything": everything, "pages": pages, "number": number, "state": state,
            "type": kind, "sort": sort, "descending": descending, "columns": COLUMNS, "states": STATES, "types": TYPES,
        },
    )


NAV = [Nav(name="batches", title="Batches", path="/batches", key="b")]
ROUTES = [Route("/batches", batches)]
