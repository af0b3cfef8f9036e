"""Batches of a trainer that asks for them by its step, and asks again when it was killed and goes on.

A batch that the log has is given again, as it was or as soon as it is complete; one that it has not is submitted. So
nothing is generated twice, whatever died in between. Runs that failed for good are missing in what is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import orjson

from trinity_es.actors.commands import PollBatch, ScheduleTasks, TakeResults
from trinity_es.actors.plugins import did_you_mean
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError, FinalizeTimeout, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchLifecycleState, Task
from trinity_es.projections.batch import BatchState

__all__ = [
    "Mode", "PromptRows", "Runs", "failures", "find_batch", "has_result", "play_batch", "prompt_key", "submit_batch",
]

Mode = Literal["train", "eval"]
Runs = dict[tuple[int, int], list[Experience]]
"""What the runs of a batch gave, by (task, run); those that failed for good are not there."""
ALL_TASKS = 2**31 - 1
"""More tasks than a batch can have ready: who asks for so many waits until nothing runs."""
POLL_SECONDS = 4.0
"""How long one question after an eval batch stays open."""
TELL_SECONDS = 120.0
"""Interval between two lines that say what a batch waits for."""

_log = logging.getLogger(__name__)


def find_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task]) -> BatchState | None:
    """Return the batch of this id in the log, open or ended, None where it is to be submitted.

    That is so for one that was aborted, too, and for one of which no run succeeded. Raises DataError where it was
    made of other prompts.
    """
    state = client.log.current(batch_id)
    if state is None or state.state is BatchLifecycleState.ABORTED or state.failed_whole:
        return None
    told = [task for event in client.log.handed_in(batch_id) for task in client.log.tasks_of(event)]
    was = [((task.get("raw_task") or {}).get("prompt"), task.get("repeat_times") or 1) for task in told]
    now = [(_plain((task.raw_task or {})["prompt"]), task.repeat_times or 1) for task in tasks]
    if was != now:
        raise DataError(
            f"batch {batch_id!r} is in the log with other prompts than those asked for now: the data, their order or "
            "num_generations changed. Go on with what it began with, or begin anew with another store"
        )
    return state


def has_result(client: RolloutClient, batch_id: str) -> bool:
    """Return True if the log has this batch whole: finalized, with a run that succeeded."""
    state = client.log.current(batch_id)
    return state is not None and state.state is BatchLifecycleState.FINALIZED and not state.failed_whole


def submit_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task], mode: Mode) -> None:
    """Submit a batch unless the log has it. Raises what `find_batch` does."""
    if find_batch(client, batch_id, tasks) is not None:
        return
    if mode == "train":
        client.submit_batch(batch_id=batch_id, tasks=tasks, batch_type="train")
    else:
        client.request(ScheduleTasks(batch_id=batch_id, tasks=client.pack(tasks)))


def play_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task], mode: Mode) -> Runs:
    """Submit a batch unless the log has it, wait for it, and return what its runs gave.

    A train batch goes through `buffer.pipeline`; an eval one is scheduled, so that nobody trains on it, and does not.
    Raises WorkflowError where no run succeeded.
    """
    submit_batch(client, batch_id, tasks, mode)
    if mode == "train":
        _finalize(client, batch_id)
    else:
        _collect(client, batch_id)
    state = client.batch(batch_id)
    if not any(task.done for task in state.tasks):
        raise WorkflowError(
            f"batch {batch_id!r}: no run succeeded ({state.state}). {failures(state)}; mend it and go on: it is "
            "generated again then (a module of yours that runners have loaded they load again only when they start: "
            "`trinity-es restart-runner`)"
        )
    if mode == "train":
        experiences = list(client.experiences(batch_id))
    else:
        experiences = client.read([ref for task in state.tasks for ref in task.payloads])
    if failed := failures(state):
        _log.warning("batch %r: runs failed for good and are left out. %s", batch_id, failed)
    experiences.sort(key=lambda e: (e.eid.task, e.eid.run, e.eid.step))
    return {run: list(found) for run, found in groupby(experiences, lambda e: (int(e.eid.task), int(e.eid.run)))}


def failures(state: BatchState) -> str:
    """Return what the first task said of which runs failed, and how many did; empty where all completed."""
    told = [f"Task {n}: {s.message}" for n, s in sorted(state.statuses.items()) if s.message]
    more = f" (so did {len(told) - 1} more of {len(state.tasks)} tasks)" if len(told) > 1 else ""
    return f"{told[0]}{more}" if told else ""


def _finalize(client: RolloutClient, batch_id: str) -> None:
    while True:
        try:
            client.finalize_train_batch(batch_id, timeout=TELL_SECONDS)
            return
        except FinalizeTimeout:
            _log.warning("%s", client.why(batch_id))


def _collect(client: RolloutClient, batch_id: str) -> None:
    while True:
        told = client.request(PollBatch(batch_id=batch_id, at_least=ALL_TASKS, seconds=POLL_SECONDS, resume=True))
        if told["open"] == 0:
            break
    if ready := client.batch(batch_id).ready_tasks():
        client.request(TakeResults(batch_id=batch_id, submission=told["submission"], tasks=ready))


class PromptRows:
    """The rows of data sets (`datasets.Dataset`, by name) by their prompts: a trainer hands on the prompt alone."""

    def __init__(self, datasets: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """`columns`: those that a task gets beside its prompt; None: all.

        Raises DataError for a column that is not there, for two rows of one prompt that differ in these, and for a
        stream of more than prompts, unless no columns are asked for.
        """
        self._datasets, self._asked = datasets, columns
        self._columns = {name: _chosen(name, data, columns) for name, data in datasets.items()}
        self._found: dict[bytes, tuple[str, int]] = {}
        for name, data in datasets.items():
            if _is_stream(data):
                continue
            for i, prompt in enumerate(data["prompt"]):
                before = self._found.setdefault(prompt_key(prompt), (name, i))
                if before != (name, i) and self._row(*before) != self._row(name, i):
                    raise DataError(
                        f"rows {before[1]} of {before[0]} and {i} of {name} have the same prompt and differ in "
                        f"{', '.join(self._columns[name])}, and TRL hands on the prompt alone: tell them apart in the "
                        "prompt, or name in `columns` what tasks need"
                    )

    def _row(self, name: str, index: int) -> dict[str, Any]:
        if not self._columns[name]:
            return {}
        row = self._datasets[name][index]
        return {column: row[column] for column in self._columns[name]}

    def task_row(self, prompt: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a task of this prompt has as `raw_task`, and where it came from (`Task.index`).

        Raises DataError for a prompt that no data set has, where columns are asked for.
        """
        found = self._found.get(prompt_key(prompt))
        if found is None:
            if any(self._columns.values()) or (not self._datasets and self._asked != []):
                raise DataError(
                    f"no row of {', '.join(self._datasets) or 'a data set'} has the prompt {repr(prompt)[:100]}, and "
                    "the columns of a task are looked up by its prompt: give the trainer the data set that it is of, "
                    "with the prompts as they stand there, or columns=[] where tasks need the prompt alone"
                )
            return {"prompt": prompt}, {}
        return {**self._row(*found), "prompt": prompt}, {"taskset": found[0], "index": found[1]}


def _chosen(name: str, data: Any, columns: Sequence[str] | None) -> list[str]:
    there = list(getattr(data, "column_names", None) or [])
    if there and (missing := [column for column in ("prompt", *(columns or ())) if column not in there]):
        meant = did_you_mean(missing[0], there)
        raise DataError(f"{name} has no column {missing[0]!r}: it has {', '.join(there)}{meant}")
    if _is_stream(data) and (columns or (columns is None and there != ["prompt"])):
        raise DataError(
            f"{name} is a stream, whose rows can't be looked up by their prompts: give columns=[], with which tasks "
            "have the prompt alone, or a data set that is no stream"
        )
    return list(columns) if columns is not None else [column for column in there if column != "prompt"]


def _is_stream(data: Any) -> bool:
    return not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))  # torch gives a stream the first, too


def prompt_key(prompt: Any) -> bytes:
    """Return a prompt, or a list of them, as bytes that tell it from others. Raises DataError for what is no JSON."""
    try:
        return orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)
    except TypeError as e:
        raise DataError(f"a prompt is no JSON ({e}): {repr(prompt)[:100]}") from e


def _plain(value: Any) -> Any:
    return orjson.loads(prompt_key(value))
