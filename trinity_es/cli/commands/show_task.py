"""The command `show BATCH --task N [--run N]`: one task, or one of its runs with texts and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trinity_es.audit.rollout_reader import read_runs, submitted_task
from trinity_es.cli.common import print_json
from trinity_es.cli.render import batch_tables
from trinity_es.cli.render import task as views_task
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import Attempt, RunRow
from trinity_es.projections.history.task_history import TaskHistory, follow_task, prompt_of
from trinity_es.projections.reading.cut_tasks import continuations
from trinity_es.projections.reading.journal_parts import JournalPart, kept_parts
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.runner_history import WeightsLoad, WeightsVersion

__all__ = ["show_task"]


def show_task(
    log: Log, batch_id: BatchId, task: int, run: int | None, eid: str | None, *, every: bool, as_json: bool
) -> None:
    """Print one task, or one of its runs with all experiences or the experience `eid`.

    Raises BatchNotFound if there is no such task, run or experience.
    """
    history, sample = follow_task(log.events(batch_id), task), submitted_task(log, batch_id, task)
    if history.state == "dropped":
        history.turns += continuations(log, batch_id, task)
    out = batch_tables.console()
    if run is None:
        parts = kept_parts(log, {a.kept.payload for a in history.attempts if a.kept is not None})
        if as_json:
            runs = [_run_json(row) for _, row in sorted(history.made.items())]
            attempts = [{**asdict(attempt), "parts": [asdict(part) for part in _parts_of(attempt, parts)]}
                        for attempt in history.attempts]
            print_json({**_task_json(history, sample), "attempts": attempts, "runs_made": runs})
        else:
            views_task.print_task(out, history, sample, [(a, _parts_of(a, parts)) for a in history.attempts])
        return
    row = history.made.get(run)
    if row is None:
        completed = ", ".join(map(str, sorted(history.made))) or "none"
        raise BatchNotFound(f"task {task} of batch {batch_id} has no completed run {run} (completed: {completed}). The "
                            f"task is {history.state}{history.reason and f': {history.reason}'}")
    [result] = read_runs(log, batch_id, [row], history.delivered)
    experiences = [(e, e.eid.uid in result.delivered) for e in result.experiences]
    missing = result.missing or result.trouble or None
    if eid is not None:
        uids = ", ".join(e.eid.uid for e, _ in experiences) or "none"
        experiences = [(e, delivered) for e, delivered in experiences if e.eid.uid == eid]
        if not experiences and missing is None:
            raise BatchNotFound(f"run {run} of task {task} has no experience {eid}; its experiences: {uids}")
    weights = _weights_documents(log, row, [e for e, _ in experiences])
    if as_json:
        print_json({
            **_task_json(history, sample), "run": {**_run_json(row), "kept": row.kept and asdict(row.kept)},
            "weights": weights, "payload": missing,
            "experiences": [_experience_json(e, delivered) for e, delivered in experiences],
        })
    else:
        views_task.print_run(out, history, sample, row, weights, experiences, missing, whole=every)


def _task_json(history: TaskHistory, sample: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of `--json` about the whole task. `sample`: the task as submitted."""
    return {
        "batch_id": history.batch_id, "batch_type": history.batch_type, "task": history.task, "runs": history.runs,
        "state": history.state, "reason": history.reason, "asked": sample, "prompt": prompt_of(sample),
        "trained_step": history.trained_step, "dropped_by": history.dropped_by,
        "other_prompt_tokens": history.other_prompt_tokens, "other_response_tokens": history.other_response_tokens,
        "turns": [asdict(t) for t in history.turns],
    }


def _run_json(row: RunRow) -> dict[str, Any]:
    return {
        "run": row.run, "runner": row.runner, "incarnation": row.incarnation, "attempt": row.attempt,
        "oldest_version": row.model_version, "newest_version": row.model_version_end, "reward": row.reward,
        "prompt_tokens": row.prompt_tokens, "response_tokens": row.response_tokens, "seconds": row.seconds,
        "at": row.finished_at, "position": row.finish_position,
        "payload": row.unit_payload and asdict(row.unit_payload),
    }


def _parts_of(attempt: Attempt, parts: dict[str, list[JournalPart]]) -> list[JournalPart]:
    """Return the parts of a journal that an attempt continued, for its own runs. `parts`: journals by payload."""
    runs = range(attempt.run_id_base, attempt.run_id_base + attempt.runs)
    payload_parts = () if attempt.kept is None else parts.get(attempt.kept.payload, ())
    return [part for part in payload_parts if part.run in runs]


def _experience_json(e: Experience, delivered: bool) -> dict[str, Any]:
    start = e.prompt_length
    oldest, newest = e.model_versions
    return e.to_dict() | {
        "uid": e.eid.uid, "delivered": delivered, "oldest_version": oldest, "newest_version": newest,
        "tokens": e.tokens.tolist(), "response_tokens": e.tokens[start:].tolist(),
        **{name: None if (array := getattr(e, name)) is None else array.tolist()
           for name in ("logprobs", "action_mask", "advantages", "returns")},
    }


# --- the weights that made them -------------------------------------------------------------------------------------
def _weights_documents(log: Log, row: RunRow, experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return each weights version that may have generated a token of the run, and when the run's runner loaded it."""
    oldest, newest = row.model_version or 0, row.model_version_end or 0
    token_versions: list[Any] = [v for e in experiences for v in e.model_versions]
    if token_versions and all(isinstance(v, int) for v in token_versions):
        oldest, newest = min(token_versions), max(token_versions)  # of this run; the row has those of the attempt
    published = {w.version: w for w in log.weights()}
    return [_version_json(v, published.get(v), row)
            for v in range(oldest, newest + 1) if v in published or v in (oldest, newest)]


def _version_json(version: int, published: WeightsVersion | None, row: RunRow) -> dict[str, Any]:
    """Return a weights version for `--json`. Version 0 and an engine's first weights were not published."""
    if published is None:
        return {"version": version, "published_at": None, "method": None, "path": None, "loaded_at": None}
    load: WeightsLoad | None = next((load for load in published.loads
                                     if (load.runner, load.incarnation) == (row.runner, row.incarnation)), None)
    return {"version": version, "published_at": published.published_at, "method": published.method,
            "path": published.path, "loaded_at": None if load is None else load.at}
