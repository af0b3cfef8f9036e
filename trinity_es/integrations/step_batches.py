"""Batches for trainers that request them by step, and request them again when they resume.

A batch that is in the log is awaited and returned unchanged; any other batch is submitted. So no batch is generated
twice, even after a crash. Runs that failed for good are missing from the result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from trinity_es.actors.commands import PollBatch, ScheduleTasks, TakeResults
from trinity_es.actors.plugin_lookup import did_you_mean
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError, FinalizeTimeout, WorkflowError
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.values import BatchLifecycleState, Task
from trinity_es.projections.batch import BatchState

__all__ = [
    "Mode", "PromptRows", "failures", "find_batch", "has_result", "play_batch", "prompt_key", "submit_batch",
]

Mode = Literal["train", "eval"]
ALL_TASKS = 2**31 - 1
"""More tasks than a batch can have, so a poll for that many returns when nothing runs."""
POLL_SECONDS = 4.0
"""Duration of one poll of an eval batch."""
TELL_SECONDS = 120.0
"""Interval between log lines that say what an open batch waits for."""

_log = logging.getLogger(__name__)


def find_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task]) -> BatchState | None:
    """Return the batch of this id in the log, open or ended; None if it has to be submitted.

    A batch that was aborted, or in which no run succeeded, has to be submitted again. Raises DataError if the batch in
    the log has other prompts.
    """
    state = client.log.current(batch_id)
    if state is None or state.state is BatchLifecycleState.ABORTED or state.failed_whole:
        return None
    logged = [task for event in client.log.submission_events(batch_id) for task in client.log.tasks_of(event)]
    logged_prompts = [((task.get("raw_task") or {}).get("prompt"), task.get("repeat_times") or 1) for task in logged]
    # As JSON gives the prompts back: tuples become lists.
    new_prompts = [(orjson.loads(prompt_key((t.raw_task or {})["prompt"])), t.repeat_times or 1) for t in tasks]
    if logged_prompts != new_prompts:
        raise DataError(
            f"batch {batch_id!r} is in the log with other prompts: the data, their order or num_generations changed. "
            "Restore the former ones, or start over with another store"
        )
    return state


def has_result(client: RolloutClient, batch_id: str) -> bool:
    state = client.log.current(batch_id)
    return state is not None and state.state is BatchLifecycleState.FINALIZED and not state.failed_whole


def submit_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task], mode: Mode) -> None:
    """Submit a batch unless the log has it. Raises DataError as `find_batch` does."""
    if find_batch(client, batch_id, tasks) is not None:
        return
    if mode == "train":
        client.submit_batch(batch_id=batch_id, tasks=tasks, batch_type="train")
    else:
        client.request(ScheduleTasks(batch_id=batch_id, tasks=client.pack(tasks)))


def play_batch(client: RolloutClient, batch_id: str, tasks: Sequence[Task], mode: Mode) -> ExperienceColumns:
    """Submit a batch unless the log has it, wait for it, and return its experiences by task, run and step.

    A train batch goes through `buffer.pipeline`. An eval batch is scheduled instead, so it bypasses the pipeline and no
    trainer gets it. Raises WorkflowError if no run succeeded.
    """
    submit_batch(client, batch_id, tasks, mode)
    if mode == "train":
        _finalize(client, batch_id)
    else:
        _collect(client, batch_id)
    state = client.batch(batch_id)
    if not any(task.done for task in state.tasks):
        raise WorkflowError(
            f"batch {batch_id!r}: no run succeeded ({state.state}). {failures(state)}; fix the cause and resume, which "
            "generates the batch again. After a change of a module of yours also run `trinity-es restart-runner`"
        )
    if mode == "train":
        columns = client.columns(batch_id)
    else:
        columns = client.read([ref for task in state.tasks for ref in task.payloads])
    failure_text = failures(state)
    if failure_text:
        _log.warning("batch %r: runs failed for good and are left out. %s", batch_id, failure_text)
    places = list(zip(columns.tasks, columns.runs.tolist(), columns.steps.tolist(), strict=True))
    return columns[sorted(range(len(places)), key=lambda row: places[row])]


def failures(state: BatchState) -> str:
    """Return a text with the first failed task's message and the number of failed tasks; "" if no task failed."""
    messages = [f"Task {n}: {status.message}" for n, status in sorted(state.statuses.items()) if status.message]
    if not messages:
        return ""
    others = f" (so did {len(messages) - 1} more of {len(state.tasks)} tasks)" if len(messages) > 1 else ""
    return f"{messages[0]}{others}"


def _finalize(client: RolloutClient, batch_id: str) -> None:
    """Finalize a train batch, without a time limit. Log every `TELL_SECONDS` what the batch waits for."""
    while True:
        try:
            client.finalize_train_batch(batch_id, timeout=TELL_SECONDS)
            return
        except FinalizeTimeout:
            _log.warning("%s", client.why(batch_id))


def _collect(client: RolloutClient, batch_id: str) -> None:
    """Wait until no task of a scheduled batch is open, and take the results, which ends the batch."""
    while True:
        poll = client.request(PollBatch(batch_id=batch_id, at_least=ALL_TASKS, seconds=POLL_SECONDS, resume=True))
        if poll["open"] == 0:
            break
    ready_tasks = client.batch(batch_id).ready_tasks()
    if ready_tasks:
        client.request(TakeResults(batch_id=batch_id, submission=poll["submission"], tasks=ready_tasks))


class PromptRows:
    """Rows of data sets (`datasets.Dataset`, by name), looked up by prompt, since a trainer passes on only the prompt.

    `columns`: columns that a task gets beside its prompt; None: all. Raises DataError for a missing column, for rows
    with the same prompt that differ in these columns, and for a stream, unless only its prompts are used.
    """

    def __init__(self, datasets: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        self._datasets, self._requested = datasets, columns
        self._columns = {name: _task_columns(name, data, columns) for name, data in datasets.items()}
        self._rows: dict[bytes, tuple[str, int]] = {}
        """(data set, index) by prompt."""
        for name, data in datasets.items():
            if _is_stream(data):
                continue
            for i, prompt in enumerate(data["prompt"]):
                first_name, first_i = self._rows.setdefault(prompt_key(prompt), (name, i))
                is_repeated = (first_name, first_i) != (name, i)
                if is_repeated and self._row(first_name, first_i) != self._row(name, i):
                    raise DataError(
                        f"row {first_i} of {first_name} and row {i} of {name} have the same prompt and differ in "
                        f"{', '.join(self._columns[name])}, but TRL passes on only the prompt: make the prompts "
                        "differ, or name in `columns` only those that tasks need"
                    )

    def _row(self, name: str, index: int) -> dict[str, Any]:
        if not self._columns[name]:
            return {}
        row = self._datasets[name][index]
        return {column: row[column] for column in self._columns[name]}

    def task_row(self, prompt: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the `raw_task` for this prompt, and the row's data set and index (`Task.index`).

        Raises DataError if tasks need columns and no data set has this prompt.
        """
        origin = self._rows.get(prompt_key(prompt))
        if origin is None:
            if any(self._columns.values()) or (not self._datasets and self._requested != []):
                raise DataError(
                    f"no row of {', '.join(self._datasets) or 'a data set'} has the prompt {repr(prompt)[:100]}, by "
                    "which the other columns of a task are found. Give the trainer the data set with this prompt, "
                    "unchanged, or Rollouts(columns=[]) if tasks need only the prompt"
                )
            return {"prompt": prompt}, {}
        name, index = origin
        return {**self._row(name, index), "prompt": prompt}, {"taskset": name, "index": index}


def _task_columns(name: str, data: Any, columns: Sequence[str] | None) -> list[str]:
    """Return the columns of a data set that tasks get beside the prompt. Raises DataError as `PromptRows` does."""
    existing = list(getattr(data, "column_names", None) or [])
    missing = [column for column in ("prompt", *(columns or ())) if column not in existing]
    if existing and missing:  # a stream may not know its columns
        hint = did_you_mean(missing[0], existing)
        raise DataError(f"{name} has no column {missing[0]!r}: it has {', '.join(existing)}{hint}")
    if _is_stream(data) and (columns or (columns is None and existing != ["prompt"])):
        raise DataError(
            f"{name} is a stream, so its rows can't be found by their prompts: give a data set that is not a stream, "
            "or columns=[], with which tasks get only the prompt"
        )
    return list(columns) if columns is not None else [column for column in existing if column != "prompt"]


def _is_stream(data: Any) -> bool:
    """Return whether this data has no rows by index. (torch's streams have __getitem__, but no len.)"""
    return not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def prompt_key(prompt: Any) -> bytes:
    """Return canonical bytes of a prompt, or of a list of prompts. Raises DataError if it is not JSON."""
    try:
        return orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)
    except TypeError as e:
        raise DataError(f"a prompt can't be written as JSON ({e}): {repr(prompt)[:100]}") from e
