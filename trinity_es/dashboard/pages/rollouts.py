"""Rollouts of a batch, or of the newest ones: sorted by what they were worth. And one of them: what was asked and
answered, token by token, what it was worth, and where all of it comes from.
"""

from __future__ import annotations

from typing import Any

from trinity_es.audit.rollouts import Found, task_asked
from trinity_es.dashboard import rollout_values, tokens
from trinity_es.dashboard.page import Attachment, Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.batch import courses
from trinity_es.events.errors import BatchNotFound, PayloadNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, Sort, chosen
from trinity_es.text import cut

__all__ = ["NAV", "ROUTES", "rollout", "rollouts", "whole"]

PER_PAGE = 50
NEWEST = 5
"""Batches that the list shows where none is named."""
SORTS: tuple[Sort, ...] = ("reward", "tokens", "seconds", "task", "position")


def _kept_batch(ask: PageRequest, batch_id: BatchId) -> BatchTimeline:
    """Return a batch run by run; of one that is kept only what is new is read. Raises BatchNotFound."""
    with courses(ask).of(ask.log, batch_id) as course:
        assert course.story is not None  # it was followed
        return course.story


def rollouts(ask: PageRequest) -> Page:
    """`/rollouts?id=BATCH`: its runs; without an id those of the newest batches of a type."""
    batch_type = ask.choice("type", ("train", "eval", "collect"), "train")
    batches: list[BatchTimeline] = []
    if ask.text("id"):
        batches.append(_kept_batch(ask, ask.batch()))
        batch_type = batches[0].state.batch_type
    else:
        for row in ask.log.batches(batch_type=batch_type, sort="position", descending=True, limit=NEWEST):
            try:
                batches.append(_kept_batch(ask, row.batch_id))
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


def rollout(ask: PageRequest) -> Page:
    """`/rollout?id=BATCH&task=T&run=R&step=I`: experience number I of this run."""
    batch = _kept_batch(ask, ask.batch())
    if (page := _not_ended(ask, batch)) is not None:
        return page
    batch, row, found, step = _asked(ask)
    batch_id, task, run = batch.batch_id, row.task, row.run
    one = found.experiences[step] if found.experiences else None
    decode, source = _decoder(ask)
    before, after = _neighbours(batch, row)
    submitted = task_asked(ask.log, batch_id, task)
    return Page(
        template="rollout.html",
        title=f"Run {run} of task {task} of batch {batch_id}",
        nav="rollouts",
        watch=(batch_stream(batch_id),) if not batch.state.state.ended else (),
        values={
            "batch": batch, "row": row, "found": found, "step": step, "before": before, "after": after,
            "one": one and rollout_values.experience_values(one, decode, source),
            "delivered": one and found.delivered.get(one.eid.uid),
            "task": submitted and cut(rollout_values.as_json(submitted), rollout_values.MOST_JSON)[0],
            "commands": rollout_values.commands(ask.log.url, row),
            "text_url": ask.url(step=step).replace("/rollout?", "/rollout.txt?", 1),
        },
    )


def _not_ended(ask: PageRequest, batch: BatchTimeline) -> Page | None:
    """Return a page for a run that is still to end; it becomes the run's own when it has."""
    task, run = ask.number("task"), ask.number("run")
    if batch.row(task, run) is not None or task >= len(batch.tasks) or run >= batch.tasks[task].runs:
        return None
    return Page(
        template="rollout_open.html", title=f"Run {run} of task {task} of batch {batch.batch_id}", nav="rollouts",
        watch=(batch_stream(batch.batch_id),), values={"batch": batch, "task": task, "run": run},
    )


def whole(ask: PageRequest) -> Attachment:
    """`/rollout.txt`, asked as `/rollout`: all of its text, to be saved."""
    batch, row, found, step = _asked(ask)
    if not found.experiences:
        raise PayloadNotFound(found.missing)
    name = f"rollout-{batch.batch_id}-{row.task}-{row.run}-{step}.txt"
    return Attachment(name=name, text=rollout_values.whole_text(found.experiences[step]))


def _asked(ask: PageRequest) -> tuple[BatchTimeline, RunRow, Found, int]:
    """Return the batch, the run, what it produced, and which of that is meant. Raises BatchNotFound."""
    batch = _kept_batch(ask, ask.batch())
    task, run = ask.number("task"), ask.number("run")
    row = batch.row(task, run)
    if row is None:
        raise BatchNotFound(f"run {run} of task {task} of batch {batch.batch_id!r} has not ended, or there is none")
    [found] = rollout_values.read_runs(ask.log, batch, [row])
    return batch, row, found, min(ask.number("step"), max(0, len(found.experiences) - 1))


def _neighbours(batch: BatchTimeline, row: RunRow) -> tuple[RunRow | None, RunRow | None]:
    order = sorted(batch.rows, key=lambda r: (r.task, r.run))
    at = next(i for i, r in enumerate(order) if r is row)
    return order[at - 1] if at else None, order[at + 1] if at + 1 < len(order) else None


def _decoder(ask: PageRequest) -> tuple[tokens.Decode | None, str]:
    """Return the tokenizer of the run's model, loaded once for each config that the run was started with."""
    _, config = ask.log.config()
    known: tuple[dict[str, Any], tuple[tokens.Decode | None, str]] | None = ask.kept.get("decoder")
    if known is None or known[0] != config:
        known = config, tokens.decoder(config)
        ask.kept["decoder"] = known
    return known[1]


NAV = [Nav(name="rollouts", title="Rollouts", path="/rollouts", key="l")]
ROUTES = [Route("/rollouts", rollouts), Route("/rollout", rollout), Route("/rollout.txt", whole)]
