"""The list of rollouts of a batch or of the newest batches, and the page of one rollout."""

from __future__ import annotations

from typing import Any

from trinity_es.audit.rollout_reader import Found, task_asked
from trinity_es.dashboard import rollout_values, tokens
from trinity_es.dashboard.page_urls import Attachment, Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.batch import batch_cache
from trinity_es.events.errors import BatchNotFound, PayloadNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, Sort, select_runs
from trinity_es.safe_text import cut

__all__ = ["NAV", "ROUTES", "rollout", "rollouts", "whole"]

PER_PAGE = 50
NEWEST = 5
"""Number of batches in the list if none is named."""
SORTS: tuple[Sort, ...] = ("reward", "tokens", "seconds", "task", "position")


def _kept_batch(request: PageRequest, batch_id: BatchId) -> BatchTimeline:
    """Return a batch from the cache, followed up to now. Raises BatchNotFound."""
    with batch_cache(request).of(request.log, batch_id) as cached:
        assert cached.timeline is not None
        return cached.timeline


def rollouts(request: PageRequest) -> Page:
    """Return the page `/rollouts?id=BATCH` of its runs; without an id, of the newest batches of a type."""
    batch_type = request.choice("type", ("train", "eval", "collect"), "train")
    batches: list[BatchTimeline] = []
    if request.text("id"):
        batches.append(_kept_batch(request, request.batch()))
        batch_type = batches[0].state.batch_type
    else:
        for row in request.log.batches(batch_type=batch_type, sort="position", descending=True, limit=NEWEST):
            try:
                batches.append(_kept_batch(request, row.batch_id))
            except BatchNotFound:
                continue
    sort = next(s for s in SORTS if s == request.choice("sort", list(SORTS), "reward"))
    descending = request.choice("dir", ("up", "down"), "up" if sort == "task" else "down") == "down"
    every = [row for batch in batches for row in batch.rows]
    outcomes = sorted({row.outcome for row in every})
    outcome = request.choice("outcome", outcomes) or None
    task = request.number("task", -1, low=-1) if request.text("task") else None
    rows = select_runs(every, sort=sort, descending=descending, task=task, outcome=outcome)
    number, pages = request.page_of(len(rows), PER_PAGE)
    shown: list[RunRow] = list(rows[(number - 1) * PER_PAGE : number * PER_PAGE])
    rewards = [row.reward for row in rows if row.reward is not None]
    watched = tuple(batch_stream(b.batch_id) for b in batches) if request.text("id") else ("batch/",)
    return Page(
        template="rollouts.html",
        title=f"Rollouts of batch {batches[0].batch_id}" if request.text("id") else "Rollouts",
        nav="rollouts",
        watch=watched,
        values={
            "batch_id": batches[0].batch_id if request.text("id") else None, "batches": [b.batch_id for b in batches],
            "type": batch_type, "rows": shown, "total": len(rows), "page_number": number, "pages": pages, "sort": sort,
            "descending": descending, "outcome": outcome, "outcomes": outcomes, "task": task,
            "previews": rollout_values.previews(request.log, shown), "first": (number - 1) * PER_PAGE,
            "mean": sum(rewards) / len(rewards) if rewards else None,
            "best": max(rewards, default=None), "worst": min(rewards, default=None),
        },
    )


def rollout(request: PageRequest) -> Page:
    """Return the page `/rollout?id=BATCH&task=T&run=R&step=I` of experience number I of this run."""
    batch = _kept_batch(request, request.batch())
    if (page := _open_run_page(request, batch)) is not None:
        return page
    batch, row, found, step = _requested_run(request)
    batch_id, task, run = batch.batch_id, row.task, row.run
    one = found.experiences[step] if found.experiences else None
    decode, source = _decoder(request)
    before, after = _neighbours(batch, row)
    submitted = task_asked(request.log, batch_id, task)
    return Page(
        template="rollout.html",
        title=f"Run {run} of task {task} of batch {batch_id}",
        nav="rollouts",
        watch=(batch_stream(batch_id),) if not batch.state.state.ended else (),
        values={
            "batch": batch, "row": row, "found": found, "step": step, "before": before, "after": after,
            "one": one and rollout_values.experience_values(one, decode, source),
            "delivered": one and found.delivered.get(one.eid.uid),
            "task": submitted and cut(rollout_values.as_json(submitted), rollout_values.JSON_CHARACTERS)[0],
            "kept": row.kept and kept_text(row.kept), "commands": rollout_values.commands(request.log.url, row),
            "text_url": request.url(step=step).replace("/rollout?", "/rollout.txt?", 1),
        },
    )


def _open_run_page(request: PageRequest, batch: BatchTimeline) -> Page | None:
    """Return the page of an open run; None for an ended or unknown run."""
    task, run = request.number("task"), request.number("run")
    if batch.row(task, run) is not None or task >= len(batch.tasks) or run >= batch.tasks[task].runs:
        return None
    kept = next((flight.kept for (of_task, first), flight in batch.state.flights.items()
                 if of_task == task and first <= run < first + flight.unit.runs), None)
    return Page(
        template="rollout_open.html", title=f"Run {run} of task {task} of batch {batch.batch_id}", nav="rollouts",
        watch=(batch_stream(batch.batch_id),),
        values={"batch": batch, "task": task, "run": run, "kept": kept and kept_text(kept)},
    )


def whole(request: PageRequest) -> Attachment:
    """Return the whole text of a rollout as a file; `/rollout.txt` has the parameters of `/rollout`."""
    batch, row, found, step = _requested_run(request)
    if not found.experiences:
        raise PayloadNotFound(found.missing)
    name = f"rollout-{batch.batch_id}-{row.task}-{row.run}-{step}.txt"
    return Attachment(name=name, text=rollout_values.whole_text(found.experiences[step]))


def _requested_run(request: PageRequest) -> tuple[BatchTimeline, RunRow, Found, int]:
    """Return the batch, the run, its experiences, and the index of the requested one. Raises BatchNotFound."""
    batch = _kept_batch(request, request.batch())
    task, run = request.number("task"), request.number("run")
    row = batch.row(task, run)
    if row is None:
        raise BatchNotFound(f"run {run} of task {task} of batch {batch.batch_id!r} has not ended, or does not exist")
    [found] = rollout_values.read_runs(request.log, batch, [row])
    return batch, row, found, min(request.number("step"), max(0, len(found.experiences) - 1))


def _neighbours(batch: BatchTimeline, row: RunRow) -> tuple[RunRow | None, RunRow | None]:
    order = sorted(batch.rows, key=lambda r: (r.task, r.run))
    at = next(i for i, r in enumerate(order) if r is row)
    return order[at - 1] if at else None, order[at + 1] if at + 1 < len(order) else None


def _decoder(request: PageRequest) -> tuple[tokens.Decode | None, str]:
    """Return the tokenizer of the run's model, loaded once per config of the run."""
    _, config = request.log.config()
    kept: tuple[dict[str, Any], tuple[tokens.Decode | None, str]] | None = request.kept.get("decoder")
    if kept is None or kept[0] != config:
        kept = config, tokens.decoder(config)
        request.kept["decoder"] = kept
    return kept[1]


NAV = [Nav(name="rollouts", title="Rollouts", path="/rollouts", key="l")]
ROUTES = [Route("/rollouts", rollouts), Route("/rollout", rollout), Route("/rollout.txt", whole)]
