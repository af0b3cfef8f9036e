"""What the fields of commands may hold: each kind of value with its check, and a command made of what a client sent.

Nothing of a request is looked at, read or folded before `read_fields` has seen all of it: what passes here can be
recorded. Names become parts of streams and columns of tables, so they are short and printable; texts are anything that
every database can hold; numbers fit into the columns that they end in.

A kind is a type with its reader: `Annotated[str, reader]`. Lists, mappings, literals, optional values and dataclasses
of kinds need no reader of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from trinity_es.actors.requests import Parcel
from trinity_es.events.errors import DataError
from trinity_es.events.values import MOST_METRICS, NAME_LENGTH, BatchId, require_batch_id, shown
from trinity_es.events.vocabulary import Answer, PayloadRef, TasksetSource

__all__ = [
    "NAME_LENGTH",
    "TEXT_LENGTH",
    "AdapterName",
    "AnswerGiven",
    "Batch",
    "Count",
    "Digest",
    "Experiences",
    "Finalized",
    "Flag",
    "Name",
    "Number",
    "Port",
    "Position",
    "Positive",
    "Seconds",
    "ShortText",
    "SourceFound",
    "TableNumber",
    "Tasks",
    "TasksetName",
    "Text",
    "Whole",
    "check_tasks",
    "is_request_id",
    "is_storable",
    "read_fields",
    "shown",
]

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

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_Reader = Callable[[str, Any], Any]
"""Makes a field's value of what was sent under its name. Raises DataError, with the name, where it can't."""


# --- readers --------------------------------------------------------------------------------------------------------
def _wrong(name: str, value: Any, expected: str) -> DataError:
    return DataError(f"{name} is {shown(value)}: {expected} is expected")


def is_storable(value: str) -> bool:
    """Return True if every database can hold this text: PostgreSQL has no NUL, and none has half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _name(length: int = NAME_LENGTH) -> _Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, str) or not 0 < len(value) <= length or not value.isprintable():
            raise _wrong(name, value, f"a name of 1 to {length} printable characters")
        return value

    return read


def _text(length: int = TEXT_LENGTH) -> _Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, str) or len(value) > length or not is_storable(value):
            raise _wrong(name, value, f"a text of at most {length} characters, without NUL and half surrogate pairs,")
        return value

    return read


def _whole(least: int = 1 - WHOLE, below: int = WHOLE) -> _Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
            raise _wrong(name, value, f"a whole number from {least} to {below - 1}")
        return value

    return read


def _number(name: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    if not whole and not (isinstance(value, float) and math.isfinite(value)):
        raise _wrong(name, value, "a finite number")
    return value


def _seconds(name: str, value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= SECONDS:
        raise _wrong(name, value, f"a number of seconds, at most {SECONDS:.0f},")
    return value


def _flag(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _batch_id(name: str, value: Any) -> Any:
    if isinstance(value, str) and not is_storable(value):
        raise _wrong(name, value, "the id of a batch, of printable characters,")
    return require_batch_id(value)


def _parcel(name: str, value: Any) -> Any:
    good = isinstance(value, Parcel) and (
        isinstance(value.inline, bytes) if value.digest is None
        else value.inline is None and isinstance(value.digest, str) and _DIGEST.fullmatch(value.digest) is not None
    )
    if not good:
        raise _wrong(name, value, "JSON, or the digest of a payload that holds it,")
    return value


def _digest(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _wrong(name, value, "the digest of a payload, 64 hexadecimal digits,")
    return value


def _adapter(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not _ADAPTER.fullmatch(value):
        raise _wrong(name, value, "a name of letters, digits, dots, dashes and underscores, 100 at most,")
    return value


def _one_of(*values: str) -> _Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            raise _wrong(name, value, " or ".join(repr(v) for v in values))
        return value

    return read


def _or_none(reader: _Reader) -> _Reader:
    return lambda name, value: None if value is None else reader(name, value)


def _list_of(reader: _Reader) -> _Reader:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, "a list")
        return [reader(f"{name}[{number}]", item) for number, item in enumerate(value)]

    return read


def _mapping(reader: _Reader) -> _Reader:
    """Return the reader of a mapping from names to values of one kind."""
    key = _text(NAME_LENGTH)

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(name, value, "a mapping")
        if len(value) > MOST_METRICS:
            raise DataError(f"{name} holds {len(value):,} values: at most {MOST_METRICS:,} are expected")
        return {key(f"a name in {name}", k): reader(f"{name}[{k!r}]", v) for k, v in value.items()}

    return read


def _record(cls: type[Any], **readers: _Reader) -> _Reader:
    return lambda name, value: _built(cls, readers, name, value, f"{name}.")


def _built(cls: type[Any], readers: Mapping[str, _Reader], name: str, value: Any, prefix: str) -> Any:
    """Return an object of a dataclass out of a mapping with a value for each field that has no default."""
    required = [f.name for f in fields(cls) if f.default is MISSING]
    if not isinstance(value, dict):
        raise _wrong(name, value, f"a mapping with {', '.join(required) or 'nothing in it'}")
    if missing := [field for field in required if field not in value]:
        raise DataError(f"{name} has no {', '.join(missing)}: {', '.join(required)} belong to it")
    if unknown := [field for field in value if field not in readers]:
        raise _wrong(f"a key of {name}", unknown[0], ", ".join(readers) or "none")
    return cls(**{field: readers[field](f"{prefix}{field}", item) for field, item in value.items()})


# --- kinds ----------------------------------------------------------------------------------------------------------
_count = _whole(0)
_ref = _record(PayloadRef, digest=_digest, first=_count, count=_count)
_answer = _record(
    Answer, message=_name(), runner=_name(), incarnation=_count, model_version=_count, model_version_end=_count,
    payload=_or_none(_ref), prompt_tokens=_count, response_tokens=_count,
)
_source = _record(
    TasksetSource, taskset=_name(TASKSET_LENGTH), is_eval=_flag, path=_text(), subset=_or_none(_text()),
    split=_or_none(_text()), asked=_or_none(_text()), revision=_text(NAME_LENGTH), args=_text(), rows=_count,
    order=_or_none(_text()),
)

Batch = Annotated[BatchId, _batch_id]
"""The id of a batch: a whole number (a step) or a text such as `12/gsm8k`."""
Name = Annotated[str, _name()]
"""1 to 200 printable characters."""
AdapterName = Annotated[str, _adapter]
"""1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit."""
Digest = Annotated[str, _digest]
"""A SHA-256, 64 hexadecimal digits."""
TasksetName = Annotated[str, _name(TASKSET_LENGTH)]
"""1 to 400 printable characters."""
Text = Annotated[str, _text()]
"""Up to 16,384 characters, without NUL and half surrogate pairs."""
ShortText = Annotated[str, _text(NAME_LENGTH)]
"""The same, up to 200 characters."""
Whole = Annotated[int, _whole()]
"""A whole number that 32 bits hold with its sign."""
Count = Annotated[int, _count]
"""A whole number of 0 or more, below 2^31."""
Positive = Annotated[int, _whole(1)]
"""A whole number of 1 or more, below 2^31."""
Position = Annotated[int, _whole(0, 2**63)]
"""A position of the log, or 0."""
TableNumber = Annotated[int, _whole(-1, 2**63)]
"""The number of a table of routes; -1 before any."""
Port = Annotated[int, _whole(0, 65_536)]
"""A TCP port."""
Number = Annotated[float, _number]
"""A finite number."""
Seconds = Annotated[float, _seconds]
"""A number of seconds, at most 1e9."""
Flag = Annotated[bool, _flag]
"""True or false."""
Finalized = Literal["train", "eval"]
"""A batch that is finalized: `train` or `eval`."""
Tasks = Annotated[Parcel, _parcel]
"""A list of tasks: JSON, or the digest of a payload that holds it."""
Experiences = Annotated[PayloadRef, _ref]
"""Where experiences lie: `digest`, `first`, `count`."""
AnswerGiven = Annotated[Answer, _answer]
"""An answer of the proxy, with the fields of `Answer` in docs/EVENTS.md."""
SourceFound = Annotated[TasksetSource, _source]
"""What a taskset is read from, with the fields of `TasksetSource` in docs/EVENTS.md."""

_known: dict[type[Any], dict[str, _Reader]] = {}


def _reader(hint: Any) -> _Reader:
    """Return what reads a field with this annotation. Raises TypeError where that is no kind."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found: _Reader = inside[1]
        return found
    if origin is Literal:
        return _one_of(*inside)
    if origin is list:
        return _list_of(_reader(inside[0]))
    if origin is dict and inside[0] is str:
        return _mapping(_reader(inside[1]))
    if origin in (Union, UnionType) and len(inside) == 2 and inside[1] is type(None):
        return _or_none(_reader(inside[0]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint, **_readers(hint))
    raise TypeError(f"{hint} is no kind of value that a command may have: see actors/commands/fields.py")


def _readers(cls: type[Any]) -> dict[str, _Reader]:
    if cls not in _known:
        hints = get_type_hints(cls, include_extras=True)
        _known[cls] = {field.name: _reader(hints[field.name]) for field in fields(cls)}
    return _known[cls]


def read_fields(cls: type[Any], name: str, value: Any) -> Any:
    """Return an object of a dataclass whose fields are kinds, out of plain data. Raises DataError, which names it."""
    return _built(cls, _readers(cls), name, value, "")


# --- what else clients send -----------------------------------------------------------------------------------------
def is_request_id(value: Any) -> bool:
    """Return True if a request can have this id: then it can be answered."""
    return isinstance(value, str) and 0 < len(value) <= NAME_LENGTH and value.isprintable()


def check_tasks(tasks: Any) -> list[dict[str, Any]]:
    """Return the tasks out of a parcel, if they are some. Raises DataError, naming the task."""
    if not isinstance(tasks, list):
        raise _wrong("tasks", tasks, "a list of tasks")
    for number, task in enumerate(tasks):
        if not isinstance(task, dict):
            raise _wrong(f"task {number}", task, "a mapping, as task_to_dict makes it,")
        _text()(f"task {number}: workflow", task.get("workflow"))
        if "repeat_times" in task:
            _whole(1, MOST_RUNS + 1)(f"task {number}: repeat_times", task["repeat_times"])
    return tasks
