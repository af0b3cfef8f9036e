"""The command `show BATCH --task N [--run N]`: one task, or one rollout with its text and weights."""

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
    """Print one task, or one of its runs. Raises BatchNotFound if there is no such task, run or experience."""
    history, sample = follow_task(log.events(batch_id), task), submitted_task(log, batch_id, task)
    if history.state == "dropped":
        history.turns += continuations(log, batch_id, task)
    out = batch_tables.console()
    if run is None:
        parts = kept_parts(log, {a.kept.payload for a in history.attempts if a.kept is not None})
        if as_json:
            runs = [_run_json(made) for _, made in sorted(history.made.items())]
            attempts = [{**asdict(attempt), "parts": [asdict(part) for part in _parts_of(attempt, parts)]}
                        for attempt in history.attempts]
            print_json({**_task_json(history, sample), "attempts": attempts, "runs_made": runs})
        else:
            views_task.print_task(out, history, sample, [(a, _parts_of(a, parts)) for a in history.attempts])
        return
    made = history.made.get(run)
    if made is None:
        done = ", ".join(map(str, sorted(history.made))) or "none"
        raise BatchNotFound(f"batch {batch_id} task {task} has no completed run {run} (it has {done}): "
                            f"{history.state}{history.reason and f', {history.reason}'}")
    [read] = read_runs(log, batch_id, [made], history.delivered)
    experiences = [(e, e.eid.uid in read.delivered) for e in read.experiences]
    gone = read.missing or read.trouble or None
    if eid is not None:
        ids = ", ".join(e.eid.uid for e, _ in experiences) or "none"
        experiences = [(e, delivered) for e, delivered in experiences if e.eid.uid == eid]
        if not experiences and gone is None:
            raise BatchNotFound(f"run {run} of task {task} has no experience {eid}; it has {ids}")
    weights = _weights(log, made, [e for e, _ in experiences])
    if as_json:
        print_json({
            **_task_json(history, sample), "run": {**_run_json(made), "kept": made.kept and asdict(made.kept)},
            "weights": weights, "payload": gone,
            "experiences": [_experience_json(e, delivered) for e, delivered in experiences],
        })
    else:
        views_task.print_run(out, history, sample, made, weights, experiences, gone, whole=every)


def _task_json(history: TaskHistory, sample: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "batch_id": history.batch_id, "batch_type": history.batch_type, "task": history.task, "runs": history.runs,
        "state": history.state, "reason": history.reason, "asked": sample, "prompt": prompt_of(sample),
        "trained_step": history.trained_step, "dropped_by": history.dropped_by,
        "other_prompt_tokens": history.other_prompt_tokens, "other_response_tokens": history.other_response_tokens,
        "turns": [asdict(t) for t in history.turns],
    }


def _run_json(made: RunRow) -> dict[str, Any]:
    return {
        "run": made.run, "runner": made.runner, "incarnation": made.incarnation, "attempt": made.attempt,
        "oldest_version": made.model_version, "newest_version": made.model_version_end, "reward": made.reward,
        "prompt_tokens": made.prompt_tokens, "response_tokens": made.response_tokens, "seconds": made.seconds,
        "at": made.finished_at, "position": made.finish_position,
        "payload": made.unit_payload and asdict(made.unit_payload),
    }


def _parts_of(attempt: Attempt, parts: dict[str, list[JournalPart]]) -> list[JournalPart]:
    runs = range(attempt.run_id_base, attempt.run_id_base + attempt.runs)
    return [] if attempt.kept is None else [part for part in parts.get(attempt.kept.payload, ()) if part.run in runs]


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
def _weights(log: Log, made: RunRow, experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return each version that may have made a token of the run, and when the run's runner loaded it."""
    low, high = made.model_version or 0, made.model_version_end or 0
    stamped: list[Any] = [v for e in experiences for v in e.model_versions]
    if stamped and all(isinstance(v, int) for v in stamped):  # the run's versions; the row's are of its whole attempt
        low, high = min(stamped), max(stamped)
    published = {w.version: w for w in log.weights()}
    return [_version_json(v, published.get(v), made)
            for v in range(low, high + 1) if v in published or v in (low, high)]


def _version_json(version: int, weights: WeightsVersion | None, made: RunRow) -> dict[str, Any]:
    if weights is None:  # 0, or the engine's first weights
        return {"version": version, "published_at": None, "method": None, "path": None, "loaded_at": None}
    load: WeightsLoad | None = next((w for w in weights.loads
                              if (w.runner, w.incarnation) == (made.runner, made.incarnation)), None)
    return {"version": version, "published_at": weights.published_at, "method": weights.method, "path": weights.path,
            "loaded_at": None if load is None else load.at}
