"""The list of rollouts of a batch or of the newest batches, and the page of one rollout."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from trinity_es.audit.rollout_reader import RunExperiences, submitted_task
from trinity_es.dashboard import rollout_values, tokens
from trinity_es.dashboard.page_urls import Attachment, Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.batch import batch_cache
from trinity_es.events.errors import BatchNotFound, PayloadNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, Sort, select_runs
from trinity_es.safe_text import cut

__all__ = ["NAV", "ROUTES", "rollout", "rollout_text", "rollouts"]

PER_PAGE = 50
NEWEST_BATCHES = 5
"""Number of batches whose runs are listed if the URL names no batch."""
SORTS: tuple[Sort, ...] = ("reward", "tokens", "seconds", "task", "position")


def _cached_timeline(request: PageRequest, batch_id: BatchId) -> BatchTimeline:
    """Return a batch's timeline up to now, from the cache. Raises BatchNotFound."""
    with batch_cache(request).of(request.log, batch_id) as cached:
        assert cached.timeline is not None
        return cached.timeline


def rollouts(request: PageRequest) -> Page:
    """Return the page `/rollouts?id=BATCH`: the runs of this batch, or without `id` of the newest batches."""
    batch_type = request.choice("type", ("train", "eval", "collect"), "train")
    batches: list[BatchTimeline] = []
    if request.text("id"):
        batches.append(_cached_timeline(request, request.batch_id()))
        batch_type = batches[0].state.batch_type
    else:
        for row in request.log.batches(batch_type=batch_type, sort="position", descending=True, limit=NEWEST_BATCHES):
            with suppress(BatchNotFound):
                batches.append(_cached_timeline(request, row.batch_id))
    sort = next(s for s in SORTS if s == request.choice("sort", list(SORTS), "reward"))
    descending = request.choice("dir", ("up", "down"), "up" if sort == "task" else "down") == "down"
    all_rows = [row for batch in batches for row in batch.rows]
    outcomes = sorted({row.outcome for row in all_rows})
    outcome = request.choice("outcome", outcomes) or None
    task = request.number("task", -1, low=-1) if request.text("task") else None
    rows = select_runs(all_rows, sort=sort, descending=descending, task=task, outcome=outcome)
    number, pages = request.page_number(len(rows), PER_PAGE)
    shown: list[RunRow] = list(rows[(number - 1) * PER_PAGE : number * PER_PAGE])
    rewards = [row.reward for row in rows if row.reward is not None]
    batch_id = batches[0].batch_id if request.text("id") else None
    return Page(
        template="rollouts.html", title="Rollouts" if batch_id is None else f"Rollouts of batch {batch_id}",
        nav="rollouts", watch=("batch/",) if batch_id is None else (batch_stream(batch_id),),
        values={
            "batch_id": batch_id, "batches": [b.batch_id for b in batches],
            "type": batch_type, "rows": shown, "total": len(rows), "page_number": number, "pages": pages, "sort": sort,
            "descending": descending, "outcome": outcome, "outcomes": outcomes, "task": task,
            "previews": rollout_values.previews(request.log, shown), "first": (number - 1) * PER_PAGE,
            "mean": sum(rewards) / len(rewards) if rewards else None,
            "best": max(rewards, default=None), "worst": min(rewards, default=None),
        },
    )


def rollout(request: PageRequest) -> Page:
    """Return the page `/rollout?id=BATCH&task=T&run=R&step=I`: one run, with its experience number I.

    The page of an open run is without experiences.
    """
    batch = _cached_timeline(request, request.batch_id())
    if (page := _open_run_page(request, batch)) is not None:
        return page
    row, run_experiences, step = _requested_run(request, batch)
    batch_id, task, run = batch.batch_id, row.task, row.run
    experience = run_experiences.experiences[step] if run_experiences.experiences else None
    decode, source = _decoder(request)
    ended_runs = sorted(batch.rows, key=lambda r: (r.task, r.run))
    place = ended_runs.index(row)
    submitted = submitted_task(request.log, batch_id, task)
    return Page(
        template="rollout.html", title=f"Run {run} of task {task} of batch {batch_id}", nav="rollouts",
        watch=(batch_stream(batch_id),) if not batch.state.state.ended else (),
        values={
            "batch": batch, "row": row, "run_experiences": run_experiences, "step": step,
            "before": ended_runs[place - 1] if place else None,
            "after": ended_runs[place + 1] if place + 1 < len(ended_runs) else None,
            "one": experience and rollout_values.experience_values(experience, decode, source),
            "delivered": experience and run_experiences.delivered.get(experience.eid.uid),
            "task": submitted and cut(rollout_values.as_json(submitted), rollout_values.JSON_CHARACTERS)[0],
            "kept": row.kept and kept_text(row.kept), "commands": rollout_values.commands(request.log.url, row),
            "text_url": request.url(step=step).replace("/rollout?", "/rollout.txt?", 1),
        },
    )


def _open_run_page(request: PageRequest, batch: BatchTimeline) -> Page | None:
    """Return the page of an open run; None if the run has ended or does not exist."""
    task, run = request.number("task"), request.number("run")
    if batch.row(task, run) is not None or task >= len(batch.tasks) or run >= batch.tasks[task].runs:
        return None
    # Results of lost attempts that the current attempt of this run continues.
    kept = next((flight.kept for (unit_task, first_run), flight in batch.state.flights.items()
                 if unit_task == task and first_run <= run < first_run + flight.unit.runs), None)
    return Page(
        template="rollout_open.html", title=f"Run {run} of task {task} of batch {batch.batch_id}", nav="rollouts",
        watch=(batch_stream(batch.batch_id),),
        values={"batch": batch, "task": task, "run": run, "kept": kept and kept_text(kept)},
    )


def rollout_text(request: PageRequest) -> Attachment:
    """Return the file `/rollout.txt`, the whole text of a rollout. Its URL parameters are those of `/rollout`."""
    batch = _cached_timeline(request, request.batch_id())
    row, run_experiences, step = _requested_run(request, batch)
    if not run_experiences.experiences:
        raise PayloadNotFound(run_experiences.missing)
    name = f"rollout-{batch.batch_id}-{row.task}-{row.run}-{step}.txt"
    return Attachment(name=name, text=rollout_values.whole_text(run_experiences.experiences[step]))


def _requested_run(request: PageRequest, batch: BatchTimeline) -> tuple[RunRow, RunExperiences, int]:
    """Return the requested run, its experiences, and the index of the requested experience. Raises BatchNotFound."""
    task, run = request.number("task"), request.number("run")
    row = batch.row(task, run)
    if row is None:
        raise BatchNotFound(f"run {run} of task {task} of batch {batch.batch_id!r} has not ended, or does not exist: "
                            "the batch's page lists its tasks")
    [run_experiences] = rollout_values.read_runs(request.log, batch, [row])
    return row, run_experiences, min(request.number("step"), max(0, len(run_experiences.experiences) - 1))


def _decoder(request: PageRequest) -> tuple[tokens.Decode | None, str]:
    """Return the decoder of token ids and its name (see `tokens.decoder`). Loaded once per config."""
    _, config = request.log.config()
    entry: tuple[dict[str, Any], tuple[tokens.Decode | None, str]] | None = request.server_values.get("decoder")
    if entry is None or entry[0] != config:
        entry = config, tokens.decoder(config)
        request.server_values["decoder"] = entry
    return entry[1]


NAV = [Nav(name="rollouts", title="Rollouts", path="/rollouts", key="l")]
ROUTES = [Route("/rollouts", rollouts), Route("/rollout", rollout), Route("/rollout.txt", rollout_text)]
