"""`show BATCH --task N [--run N]`: one task's course, or one rollout: its text, and the weights that made it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.cli.common import print_json
from trinity_es.events.errors import BatchNotFound, CorruptPayload, LogError, LogNotFound, PayloadNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.history.task_history import follow_task, prompt_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trinity_es.events.experience import Experience
    from trinity_es.events.vocabulary import PayloadRef
    from trinity_es.projections.history.task_history import MadeRun, TaskCourse
    from trinity_es.projections.reading.log_reader import Log
    from trinity_es.projections.tables.runner_history import Load, WeightsVersion

__all__ = ["show_task"]


def show_task(
    log: Log, batch_id: BatchId, task: int, run: int | None, eid: str | None, *, every: bool, as_json: bool
) -> None:
    """Print one task, or one of its runs. Raises BatchNotFound for a task, run or experience that is not there."""
    from trinity_es.cli.render import tables
    from trinity_es.cli.render import task as views_task

    course = follow_task(log.events(batch_id), task)
    if course.asked is None and course.asked_in is not None:
        course = replace(course, asked=_asked(log, *course.asked_in))
    out = tables.console()
    if run is None:
        if as_json:
            print_json({**_as_json(course), "runs_made": [asdict(m) for _, m in sorted(course.made.items())]})
        else:
            views_task.print_task(out, course)
        return
    made = course.made.get(run)
    if made is None:
        done = ", ".join(map(str, sorted(course.made))) or "none"
        raise BatchNotFound(f"batch {batch_id} task {task} has no completed run {run} (it has {done}): "
                            f"{course.state}{course.reason and f', {course.reason}'}")
    found, gone = _experiences(log, course, made)
    if eid is not None:
        found = [(e, delivered) for e, delivered in found if e.eid.uid == eid]
        if not found and gone is None:
            raise BatchNotFound(f"run {run} of task {task} has no experience {eid}")
    weights = _weights(log, made, [e for e, _ in found])
    if as_json:
        print_json({
            **_as_json(course), "run": asdict(made), "weights": weights, "payload": gone,
            "experiences": [_experience_json(e, delivered) for e, delivered in found],
        })
    else:
        views_task.print_run(out, course, made, weights, found, gone, every=every)


def _as_json(course: TaskCourse) -> dict[str, Any]:
    return {
        "batch_id": course.batch_id, "batch_type": course.batch_type, "task": course.task, "runs": course.runs,
        "state": course.state, "reason": course.reason, "asked": course.asked, "prompt": prompt_of(course.asked),
        "trained_step": course.trained_step, "dropped_by": course.dropped_by,
        "other_prompt_tokens": course.other_prompt_tokens, "other_response_tokens": course.other_response_tokens,
        "turns": [asdict(t) for t in course.turns],
    }


def _asked(log: Log, digest: str, place: int) -> dict[str, Any] | None:
    try:
        store = log.payloads()
    except LogNotFound:
        return None
    try:
        tasks = orjson.loads(store.get(digest))
        return tasks[place] if isinstance(tasks, list) and place < len(tasks) else None
    except (PayloadNotFound, CorruptPayload, orjson.JSONDecodeError):
        return None
    finally:
        store.close()


# --- what the run made ----------------------------------------------------------------------------------------------
def _experiences(log: Log, course: TaskCourse, made: MadeRun) -> tuple[list[tuple[Experience, bool]], str | None]:
    """Return the run's experiences, each with whether it was delivered; and why there are none, where that is so.

    As they were delivered, with what the pipeline made of them; those that it took out as the runner brought them in.
    """
    if made.payload is None:
        return [], "experiences of evals are not kept"
    if log.freed().get(batch_stream(course.batch_id), 0) > made.position:
        return [], "its payload was freed (store.retention)"
    try:
        brought = _read(log, [made.payload], course.task, made.run)
        delivered = {e.eid.uid: e for e in _read(log, course.delivered, course.task, made.run)}
    except (LogError, CorruptPayload, PayloadNotFound) as e:
        return [], e.message
    ours = [(e, False) if (own := delivered.pop(e.eid.uid, None)) is None else (own, True) for e in brought]
    return [*ours, *((e, True) for e in delivered.values())], None


def _read(log: Log, refs: Sequence[PayloadRef], task: int, run: int) -> list[Experience]:
    from trinity_es.events.experience import Experience

    found: list[Experience] = []
    if refs:
        store = log.payloads()
        try:
            for ref in refs:
                found += [e for e in Experience.deserialize_many(store.get(ref.digest), ref.first, ref.count)
                          if (e.eid.task, e.eid.run) == (task, run)]
        finally:
            store.close()
    return found


def _experience_json(e: Experience, delivered: bool) -> dict[str, Any]:
    start = e.prompt_length
    return e.to_dict() | {
        "uid": e.eid.uid, "delivered": delivered, "oldest_version": e.info.get("model_version"),
        "newest_version": _newest(e), "tokens": e.tokens.tolist(), "response_tokens": e.tokens[start:].tolist(),
        **{name: None if (array := getattr(e, name)) is None else array.tolist()
           for name in ("logprobs", "action_mask", "advantages", "returns")},
    }


def _newest(e: Experience) -> Any:
    oldest, drift = e.info.get("model_version"), e.info.get("model_version_drift")
    return oldest + drift if isinstance(oldest, int) and isinstance(drift, int) else oldest


# --- the weights that made them -------------------------------------------------------------------------------------
def _weights(log: Log, made: MadeRun, experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return every version that may have made a token of the run: what it was, and when its runner had it."""
    low, high = made.oldest_version, made.newest_version
    stamped: list[Any] = [v for e in experiences for v in (e.info.get("model_version"), _newest(e))]
    if stamped and all(isinstance(v, int) for v in stamped):  # of the run, not of its whole attempt
        low, high = min(stamped), max(stamped)
    known = {w.version: w for w in log.weights()}
    return [_version(v, known.get(v), made) for v in range(low, high + 1) if v in known or v in (low, high)]


def _version(version: int, weights: WeightsVersion | None, made: MadeRun) -> dict[str, Any]:
    if weights is None:  # 0, or what an engine began with
        return {"version": version, "published_at": None, "method": None, "path": None, "loaded_at": None}
    load: Load | None = next((w for w in weights.loads
                              if (w.runner, w.incarnation) == (made.runner, made.incarnation)), None)
    return {"version": version, "published_at": weights.published_at, "method": weights.method, "path": weights.path,
            "loaded_at": None if load is None else load.at}
