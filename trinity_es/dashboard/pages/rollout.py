"""One rollout: what was asked and answered, token by token, what it was worth, and where all of it comes from."""

from __future__ import annotations

from typing import Any

from trinity_es.audit.rollouts import Found, task_asked
from trinity_es.dashboard import rollout_values, tokens
from trinity_es.dashboard.page import Attachment, Page, PageRequest, Route
from trinity_es.dashboard.pages.rollouts import kept_batch
from trinity_es.events.errors import BatchNotFound, PayloadNotFound
from trinity_es.events.values import batch_stream
from trinity_es.projections.history.attempts import BatchTimeline, RunRow
from trinity_es.text import cut

__all__ = ["ROUTES", "rollout", "whole"]


def rollout(ask: PageRequest) -> Page:
    """`/rollout?id=BATCH&task=T&run=R&step=I`: experience number I of this run."""
    batch = kept_batch(ask, ask.batch())
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
    batch = kept_batch(ask, ask.batch())
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


ROUTES = [Route("/rollout", rollout), Route("/rollout.txt", whole)]
