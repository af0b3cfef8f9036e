"""`show BATCH --task N [--run N]`: one task's course, or one rollout: its text, and the weights that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trinity_es.audit.rollouts import read_runs, task_asked
from trinity_es.cli.common import print_json
from trinity_es.cli.render import tables
from trinity_es.cli.render import task as views_task
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import RunRow
from trinity_es.projections.history.task_history import TaskHistory, follow_task, prompt_of
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.runner_history import WeightsLoad, WeightsVersion

__all__ = ["show_task"]


def show_task(
    log: Log, batch_id: BatchId, task: int, run: int | None, eid: str | None, *, every: bool, as_json: bool
) -> None:
    """Print one task, or one of its runs. Raises BatchNotFound for a task, run or experience that is not there."""
    course, asked = follow_task(log.events(batch_id), task), task_asked(log, batch_id, task)
    out = tables.console()
    if run is None:
        if as_json:
            print_json({**_as_json(course, asked), "runs_made": [_run_json(m) for _, m in sorted(course.made.items())]})
        else:
            views_task.print_task(out, course, asked)
        return
    made = course.made.get(run)
    if made is None:
        done = ", ".join(map(str, sorted(course.made))) or "none"
        raise BatchNotFound(f"batch {batch_id} task {task} has no completed run {run} (it has {done}): "
                            f"{course.state}{course.reason and f', {course.reason}'}")
    [read] = read_runs(log, batch_id, [made], course.delivered)
    found, gone = [(e, e.eid.uid in read.delivered) for e in read.experiences], read.missing or read.trouble or None
    if eid is not None:
        there = [e.eid.uid for e, _ in found]
        found = [(e, delivered) for e, delivered in found if e.eid.uid == eid]
        if not found and gone is None:
            has = ", ".join(there) or "none"
            raise BatchNotFound(f"run {run} of task {task} has no experience {eid}; it has {has}")
    weights = _weights(log, made, [e for e, _ in found])
    if as_json:
        print_json({
            **_as_json(course, asked), "run": _run_json(made), "weights": weights, "payload": gone,
            "experiences": [_experience_json(e, delivered) for e, delivered in found],
        })
    else:
        views_task.print_run(out, course, asked, made, weights, found, gone, every=every)


def _as_json(course: TaskHistory, asked: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "batch_id": course.batch_id, "batch_type": course.batch_type, "task": course.task, "runs": course.runs,
        "state": course.state, "reason": course.reason, "asked": asked, "prompt": prompt_of(asked),
        "trained_step": course.trained_step, "dropped_by": course.dropped_by,
        "other_prompt_tokens": course.other_prompt_tokens, "other_response_tokens": course.other_response_tokens,
        "turns": [asdict(t) for t in course.turns],
    }


def _run_json(made: RunRow) -> dict[str, Any]:
    return {
        "run": made.run, "runner": made.runner, "incarnation": made.incarnation, "attempt": made.attempt,
        "oldest_version": made.model_version, "newest_version": made.model_version_end, "reward": made.reward,
        "prompt_tokens": made.prompt_tokens, "response_tokens": made.response_tokens, "seconds": made.seconds,
        "at": made.finished_at, "position": made.finish_position,
        "payload": made.unit_payload and asdict(made.unit_payload),
    }


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
    """Return every version that may have made a token of the run: what it was, and when its runner had it."""
    low, high = made.model_version or 0, made.model_version_end or 0
    stamped: list[Any] = [v for e in experiences for v in e.model_versions]
    if stamped and all(isinstance(v, int) for v in stamped):  # of the run, not of its whole attempt
        low, high = min(stamped), max(stamped)
    known = {w.version: w for w in log.weights()}
    return [_version(v, known.get(v), made) for v in range(low, high + 1) if v in known or v in (low, high)]


def _version(version: int, weights: WeightsVersion | None, made: RunRow) -> dict[str, Any]:
    if weights is None:  # 0, or what an engine began with
        return {"version": version, "published_at": None, "method": None, "path": None, "loaded_at": None}
    load: WeightsLoad | None = next((w for w in weights.loads
                              if (w.runner, w.incarnation) == (made.runner, made.incarnation)), None)
    return {"version": version, "published_at": weights.published_at, "method": weights.method, "path": weights.path,
            "loaded_at": None if load is None else load.at}
