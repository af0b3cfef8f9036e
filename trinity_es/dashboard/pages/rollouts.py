"""Rollouts of a batch, or of the newest ones: sorted by what they were worth."""

from __future__ import annotations

from trinity_es.dashboard import rollout_values
from trinity_es.dashboard.page import Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.batch import courses
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, Sort, chosen

__all__ = ["NAV", "ROUTES", "kept_batch", "rollouts"]

PER_PAGE = 50
NEWEST = 5
"""Batches that the list shows where none is named."""
SORTS: tuple[Sort, ...] = ("reward", "tokens", "seconds", "task", "position")


def kept_batch(ask: PageRequest, batch_id: BatchId) -> BatchTimeline:
    """Return a batch run by run; of one that is kept only what is new is read. Raises BatchNotFound."""
    with courses(ask).of(ask.log, batch_id) as course:
        assert course.story is not None  # it was followed
        return course.story


def rollouts(ask: PageRequest) -> Page:
    """`/rollouts?id=BATCH`: its runs; without an id those of the newest batches of a type."""
    batch_type = ask.choice("type", ("train", "eval", "collect"), "train")
    batches: list[BatchTimeline] = []
    if ask.text("id"):
        batches.append(kept_batch(ask, ask.batch()))
        batch_type = batches[0].state.batch_type
    else:
        for row in ask.log.batches(batch_type=batch_type, sort="position", descending=True, limit=NEWEST):
            try:
                batches.append(kept_batch(ask, row.batch_id))
            except BatchNotFound:
                continue
    sort = next(s for s in SORTS if s == ask.choice("sort", list(SORTS), "reward"))
    descending = ask.choice("dir", ("up", "down"), "up" if sort == "task" else "down") == "down"
    every = [row for batch in batches for row in batch.rows]
    outcomes = sorted({row.outcome for row in every})
    outcome = ask.choice("outcome", outcomes) or None
    task = ask.number("task", -1, low=-1) if ask.text("task") else None
    rows = chosen(every, sort=sort, descending=descending, task=task, outcome=outcome)
    number, pages = ask.page_of(len(rows), PER_PAGE)
    shown: list[RunRow] = list(rows[(number - 1) * PER_PAGE : number * PER_PAGE])
    rewards = [row.reward for row in rows if row.reward is not None]
    watched = tuple(batch_stream(b.batch_id) for b in batches) if ask.text("id") else ("batch/",)
    return Page(
        template="rollouts.html",
        title=f"Rollouts of batch {batches[0].batch_id}" if ask.text("id") else "Rollouts",
        nav="rollouts",
        watch=watched,
        values={
            "batch_id": batches[0].batch_id if ask.text("id") else None, "batches": [b.batch_id for b in batches],
            "type": batch_type, "rows": shown, "total": len(rows), "page_number": number, "pages": pages, "sort": sort,
            "descending": descending, "outcome": outcome, "outcomes": outcomes, "task": task,
            "previews": rollout_values.previews(ask.log, shown), "first": (number - 1) * PER_PAGE,
            "mean": sum(rewards) / len(rewards) if rewards else None,
            "best": max(rewards, default=None), "worst": min(rewards, default=None),
        },
    )


NAV = [Nav(name="rollouts", title="Rollouts", path="/rollouts", key="l")]
ROUTES = [Route("/rollouts", rollouts)]
