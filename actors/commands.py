"""Every command that a client may send, with what each of its arguments must be: one table, checked whole.

Nothing of a request is looked at, read or folded before `check_request` has seen all of it: what passes here can be
recorded. Names become parts of streams and columns of tables, so they are short and printable; texts are anything that
every database can hold; numbers fit into the columns that they end in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from trinity_es.actors.messages import Parcel, Request
from trinity_es.events.errors import DataError, TrinityError
from trinity_es.events.values import require_batch_id

__all__ = ["COMMANDS", "check_request", "check_tasks", "clean_report", "clean_text", "is_known_by"]

NAME_LENGTH = 200
"""Maximum characters of a name: it is a column of 255 in some tables."""
TASKSET_LENGTH = 400
"""Maximum characters of a taskset's name: it is a stream's name, and no column."""
TEXT_LENGTH = 16_384
"""Maximum characters of a text: a reason, a path, an error."""
WHOLE = 2**31
"""Bound of whole numbers: what an integer column holds in every database."""
SECONDS = 1e9
"""Maximum of a timeout, in seconds: a timer can't be set later."""
MOST_RUNS = 1_000_000
"""Maximum of the runs of one task."""
SHOWN = 80
"""Characters of a wrong value that its error shows."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
Check = Callable[[str, Any], None]
"""Raises DataError for a value that is not what it should be; the text names it."""
_T = TypeVar("_T")


# --- kinds of arguments ---------------------------------------------------------------------------------------------
def _wrong(name: str, value: Any, expected: str) -> DataError:
    try:
        shown = ascii(value)
    except Exception:  # of a number with too many digits, of a list that holds itself
        shown = f"a {type(value).__name__}"
    return DataError(f"{name} is {shown if len(shown) <= SHOWN else shown[:SHOWN] + '...'}: {expected} is expected")


def _storable(value: str) -> bool:
    """Return True if every database can hold this text: PostgreSQL has no NUL, and none has half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _name(length: int = NAME_LENGTH) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= length or not value.isprintable():
            raise _wrong(name, value, f"a name of 1 to {length} printable characters")

    return check


def _text(length: int = TEXT_LENGTH) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or len(value) > length or not _storable(value):
            raise _wrong(name, value, f"a text of at most {length} characters, without NUL and half surrogate pairs,")

    return check


def _whole(least: int = 1 - WHOLE, below: int = WHOLE) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
            raise _wrong(name, value, f"a whole number from {least} to {below - 1}")

    return check


def _number(name: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    if not whole and not (isinstance(value, float) and math.isfinite(value)):
        raise _wrong(name, value, "a finite number")


def _seconds(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= SECONDS:
        raise _wrong(name, value, f"a number of seconds, at most {SECONDS:.0f},")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")


def _one_of(*values: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in values:
            raise _wrong(name, value, " or ".join(repr(v) for v in values))

    return check


def _batch_id(name: str, value: Any) -> None:
    if isinstance(value, str) and not _storable(value):
        raise _wrong(name, value, "the id of a batch, of printable characters,")
    require_batch_id(value)


def _parcel(name: str, value: Any) -> None:
    good = isinstance(value, Parcel) and (
        isinstance(value.inline, bytes) if value.digest is None
        else value.inline is None and isinstance(value.digest, str) and _DIGEST.fullmatch(value.digest) is not None
    )
    if not good:
        raise _wrong(name, value, "JSON, or the digest of a payload that holds it,")


def _digest(name: str, value: Any) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _wrong(name, value, "the digest of a payload, 64 hexadecimal digits,")


def _or_none(check: Check) -> Check:
    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def _list_of(check: Check) -> Check:
    def checked(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, "a list")
        for number, item in enumerate(value):
            check(f"{name}[{number}]", item)

    return checked


def _mapping(check: Check) -> Check:
    """Return a mapping from names to values of one kind."""
    key = _text(NAME_LENGTH)

    def checked(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(name, value, "a mapping")
        for k, v in value.items():
            key(f"a name in {name}", k)
            check(f"{name}[{k!r}]", v)

    return checked


def _record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    def checked(name: str, value: Any) -> None:
        _check_fields(name, value, required, optional or {}, f"{name}.")

    return checked


def _check_fields(
    name: str, value: Any, required: Mapping[str, Check], optional: Mapping[str, Check], prefix: str
) -> None:
    known = {**required, **optional}
    if not isinstance(value, dict):
        raise _wrong(name, value, f"a mapping with {', '.join(required) or 'nothing in it'}")
    if missing := [key for key in required if key not in value]:
        raise DataError(f"{name} has no {', '.join(missing)}: {', '.join(required)} belong to it")
    if unknown := [key for key in value if key not in known]:
        raise _wrong(f"a key of {name}", unknown[0], ", ".join(known) or "none")
    for key, item in value.items():
        known[key](f"{prefix}{key}", item)


_ref = _record({"digest": _digest, "first": _whole(0), "count": _whole(0)})
_answer = _record(
    {
        "message": _name(), "runner": _name(), "incarnation": _whole(0), "model_version": _whole(0),
        "model_version_end": _whole(0), "payload": _or_none(_ref),
    },
    {"prompt_tokens": _whole(0), "response_tokens": _whole(0)},
)
_position, _count = _whole(0, 2**63), _whole(0)

# --- the table ------------------------------------------------------------------------------------------------------
COMMANDS: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    # Batches (handlers/batches.py)
    "submit": ({
        "batch_id": _batch_id, "tasks": _parcel, "batch_type": _one_of("train", "eval"),
        "min_wait_num": _or_none(_whole()),
        "cursor": _or_none(_list_of(_record(
            {"taskset": _name(TASKSET_LENGTH), "epoch": _count, "offset": _count}))),
    }, {}),
    "finalize": ({"batch_id": _batch_id, "batch_type": _one_of("train", "eval"), "timeout": _or_none(_seconds)}, {}),
    "abort": ({"batch_id": _batch_id, "reason": _text(), "keep_partial_results": _flag}, {}),
    "process_experiences": ({"refs": _list_of(_ref)}, {}),
    "redo": ({"batch_id": _batch_id, "tasks": _list_of(_count), "reason": _text()}, {}),
    "status": ({}, {}),
    # A trainer (handlers/trainer.py, handlers/experiences.py)
    "next_batch": ({"after": _position, "timeout": _or_none(_seconds)}, {}),
    "acknowledge": ({"batch_id": _batch_id, "step": _whole(), "metrics": _mapping(_number)}, {}),
    "resume_trainer": ({"step": _count}, {}),
    "take_experiences": ({"n": _whole(1), "timeout": _or_none(_seconds), "step": _or_none(_whole())}, {}),
    # Weights (handlers/weights.py)
    "sync_weights": ({"version": _whole(), "path": _text(), "timeout": _seconds}, {"method": _name(), "again": _flag}),
    "weight_group": ({}, {}),
    "join_weight_group": ({
        "address": _name(), "port": _whole(0, 65_536), "workers": _whole(1), "engines": _whole(0), "timeout": _seconds,
    }, {}),
    # Runners (handlers/runners.py)
    "restart_runner": ({"name": _name(), "incarnation": _whole(), "reason": _text()}, {}),
    "runner_states": ({"names": _or_none(_list_of(_text(NAME_LENGTH)))}, {}),
    # Schedulers (handlers/scheduler.py)
    "schedule": ({"batch_id": _batch_id, "tasks": _parcel}, {}),
    "poll": ({"batch_id": _batch_id, "at_least": _whole(), "seconds": _seconds, "resume": _flag}, {}),
    "poll_all": ({"settled": _whole(), "seconds": _seconds}, {}),
    "drop_rest": (
        {"batch_id": _or_none(_batch_id), "reason": _text()}, {"return_partial": _or_none(_flag)}
    ),
    "take": ({"batch_id": _batch_id, "tasks": _list_of(_count), "submission": _text(NAME_LENGTH)}, {}),
    "pause": ({"batches": _list_of(_batch_id)}, {}),
    "resume": ({}, {}),
    # The proxy (handlers/answers.py)
    "record_answers": ({"answers": _list_of(_answer)}, {}),
    "reward_answers": ({
        "messages": _list_of(_name()), "reward": _number, "task": _or_none(_text(NAME_LENGTH)),
        "run": _or_none(_whole()),
    }, {}),
    "deliver_answers": ({}, {}),
    "answers": ({}, {}),
    "routes": ({"proxy": _name(), "url": _text(NAME_LENGTH), "knows": _whole(-1, 2**63)}, {}),
}
"""Command -> the arguments that it needs, and those that it may have. Its handler is `do_<command>` of some desk."""


def check_request(request: Request) -> None:
    """Raise DataError where an argument is not what it must be, TrinityError for an unknown command."""
    known = COMMANDS.get(request.command) if isinstance(request.command, str) else None
    if known is None:
        raise TrinityError(
            f"unknown command {ascii(request.command)[:SHOWN]}: client and system are of different versions"
        )
    _check_fields(f"request {request.command!r}", request.args, *known, "")


def is_known_by(request: Any) -> bool:
    """Return True if this request's id can be one: then it can be answered."""
    given = getattr(request, "id", None)
    return isinstance(given, str) and 0 < len(given) <= NAME_LENGTH and given.isprintable()


def check_tasks(tasks: Any) -> list[dict[str, Any]]:
    """Return the tasks out of a parcel, if they are some. Raises DataError, naming the task."""
    if not isinstance(tasks, list):
        raise _wrong("tasks", tasks, "a list of tasks")
    for number, task in enumerate(tasks):
        if not isinstance(task, dict):
            raise _wrong(f"task {number}", task, "a mapping, as task_to_dict makes it,")
        _text()(f"task {number}: workflow", task.get("workflow"))
        if "repeat_times" in task:
            _whole(1 - WHOLE, MOST_RUNS + 1)(f"task {number}: repeat_times", task["repeat_times"])
    return tasks


# --- what runners and the guardian report ---------------------------------------------------------------------------
def clean_text(text: str) -> str:
    """Return the text as every database can hold it: cut, and without what can't be stored."""
    cut = text if len(text) <= TEXT_LENGTH else text[:TEXT_LENGTH] + "..."
    return cut if _storable(cut) else cut.encode(errors="replace").decode().replace("\0", "\ufffd")


def clean_report(message: _T) -> _T:
    """Return a report with its texts cleaned. They hold what engines and users' code said: that is no reason to refuse
    it.
    """
    changed = {
        f.name: clean_text(value)
        for f in fields(message)  # type: ignore[arg-type]  # every message is a dataclass
        if isinstance(value := getattr(message, f.name), str) and (len(value) > TEXT_LENGTH or not _storable(value))
    }
    return replace(message, **changed) if changed else message  # type: ignore[type-var]  # as above
