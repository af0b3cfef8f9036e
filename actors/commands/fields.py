"""Types of the fields of commands. Pydantic checks them in the sender and in the receiver.

`read_fields` checks a whole request before anything else reads it, so every database can store each value. Names are
short and printable, because they become names of streams and values in columns.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainValidator,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import core_schema

from trinity_es.actors.requests import Parcel
from trinity_es.actors.validation_errors import error_sentence
from trinity_es.events.errors import DataError
from trinity_es.events.values import MOST_METRICS, NAME_LENGTH, require_batch_id, shown
from trinity_es.events.vocabulary import Answer, PayloadRef, TasksetSource

__all__ = [
    "FIELDS", "NAME_LENGTH", "TEXT_LENGTH", "AdapterName", "AnswerGiven", "Batch", "Count", "Digest", "Experiences",
    "Finalized", "Flag", "Metrics", "Name", "Number", "Port", "Position", "Positive", "Seconds", "ShortText",
    "SourceFound", "TableNumber", "Tasks", "TasksetName", "Text", "Whole", "check_tasks", "is_request_id",
    "is_storable", "read_fields", "shown",
]

FIELDS = ConfigDict(extra="forbid", revalidate_instances="always")
"""Value of `__pydantic_config__` for dataclasses: unknown fields are refused, and each field is checked."""
TASKSET_LENGTH = 400
"""Maximum characters of a taskset's name, which is part of a stream's name and in no column."""
TEXT_LENGTH = 16_384
"""Maximum characters of a text: a reason, a path, an error."""
WHOLE = 2**31
"""Bound of whole numbers. An integer column holds smaller ones in every database."""
SECONDS = 1e9
"""Maximum of a timeout, in seconds; timers allow no more."""
MOST_RUNS = 1_000_000
"""Maximum number of runs of one task."""
_ERROR_LENGTH = 500
"""Maximum characters of an error, which may contain long keys from a client."""
_DIGEST = r"^[0-9a-f]{64}$"


# --- checks ---------------------------------------------------------------------------------------------------------
def is_storable(value: str) -> bool:
    """Return True if every database can hold this text. PostgreSQL refuses NUL, and all refuse lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _check_storable(value: str) -> str:
    if not is_storable(value):
        raise ValueError(f"must be text with no NUL and no lone surrogates, not {shown(value)}")
    return value


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"must be printable, not {shown(value)}")
    return value


def _check_number(value: Any) -> float:
    is_exact_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    if not is_exact_int and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError(f"must be a finite number, not {shown(value)}")
    return float(value)


def _check_batch_id(value: Any) -> Any:
    try:
        return _check_storable(value) if isinstance(require_batch_id(value), str) else value
    except DataError as e:
        raise ValueError(f"is no batch id: {e}") from None


def _check_parcel(value: Any) -> Parcel:
    match value:
        case Parcel(inline=bytes(), digest=None):
            return value
        case Parcel(inline=None, digest=str(digest)) if re.fullmatch(_DIGEST, digest):
            return value
    raise ValueError(f"must be JSON bytes, or the SHA-256 digest of a stored payload, not {shown(value)}")


def _record_schema(cls: type[Any], **types: Any) -> Any:
    """Return the pydantic schema of a dataclass, with `types` of its fields. It accepts an object or a mapping."""
    defaults = {f.name: ... if f.default is MISSING else f.default for f in fields(cls)}
    definitions: dict[str, Any] = {name: (type_, defaults[name]) for name, type_ in types.items()}
    model = create_model(cls.__name__, __config__=FIELDS, **definitions)

    def to_mapping(value: Any) -> Any:
        return {name: getattr(value, name) for name in types} if isinstance(value, cls) else value

    def schema(_: Any, handler: Any) -> Any:
        from_mapping = core_schema.no_info_after_validator_function(lambda m: cls(**m.__dict__), handler(model))
        return core_schema.no_info_before_validator_function(to_mapping, from_mapping)

    return GetPydanticSchema(schema)


# --- types ----------------------------------------------------------------------------------------------------------
Batch = Annotated[StrictInt | StrictStr, BeforeValidator(_check_batch_id)]
"""The id of a batch: a whole number (a step) or a text such as `12/gsm8k`."""
Name = Annotated[StrictStr, Field(min_length=1, max_length=NAME_LENGTH), AfterValidator(_check_printable)]
"""1 to 200 printable characters."""
AdapterName = Annotated[StrictStr, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
"""1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit."""
Digest = Annotated[StrictStr, Field(pattern=_DIGEST)]
"""A SHA-256, 64 hexadecimal digits."""
TasksetName = Annotated[StrictStr, Field(min_length=1, max_length=TASKSET_LENGTH), AfterValidator(_check_printable)]
"""1 to 400 printable characters."""
Text = Annotated[StrictStr, Field(max_length=TEXT_LENGTH), AfterValidator(_check_storable)]
"""Up to 16,384 characters, with no NUL and no lone surrogates."""
ShortText = Annotated[StrictStr, Field(max_length=NAME_LENGTH), AfterValidator(_check_storable)]
"""The same, up to 200 characters."""
Whole = Annotated[StrictInt, Field(gt=-WHOLE, lt=WHOLE)]
"""A whole number that 32 bits hold with its sign."""
Count = Annotated[StrictInt, Field(ge=0, lt=WHOLE)]
"""A whole number of 0 or more, below 2^31."""
Positive = Annotated[StrictInt, Field(ge=1, lt=WHOLE)]
"""A whole number of 1 or more, below 2^31."""
Position = Annotated[StrictInt, Field(ge=0, lt=2**63)]
"""A position of the log, or 0."""
TableNumber = Annotated[StrictInt, Field(ge=-1, lt=2**63)]
"""The number of a table of routes; -1 before the first."""
Port = Annotated[StrictInt, Field(ge=0, lt=65_536)]
"""A TCP port."""
Number = Annotated[float, BeforeValidator(_check_number)]
"""A finite number."""
Seconds = Annotated[float, Field(ge=-SECONDS, le=SECONDS), BeforeValidator(_check_number)]
"""A number of seconds, from -1e9 to 1e9."""
Flag = Annotated[bool, Field(strict=True)]
"""True or false."""
Finalized = Literal["train", "eval"]
"""The type of a batch that is finalized: `train` or `eval`."""
Metrics = Annotated[dict[ShortText, Number], Field(max_length=MOST_METRICS)]
"""Finite numbers by their names."""
Tasks = Annotated[Parcel, PlainValidator(_check_parcel)]
"""A list of tasks: JSON, or the digest of a payload that holds it."""
Experiences = Annotated[PayloadRef, _record_schema(PayloadRef, digest=Digest, first=Count, count=Count)]
"""Location of experiences in the payload store: `digest`, `first`, `count`."""
AnswerGiven = Annotated[Answer, _record_schema(
    Answer, message=Name, runner=Name, incarnation=Count, model_version=Count, model_version_end=Count,
    payload=Experiences | None, prompt_tokens=Count, response_tokens=Count,
)]
"""An answer of the proxy, with the fields of `Answer` in docs/EVENTS.md."""
SourceFound = Annotated[TasksetSource, _record_schema(
    TasksetSource, taskset=TasksetName, is_eval=Flag, path=Text, subset=Text | None, split=Text | None,
    asked=Text | None, revision=ShortText, args=Text, rows=Count, order=Text | None,
)]
"""The source of a taskset, with the fields of `TasksetSource` in docs/EVENTS.md."""


_type_adapter = cache(TypeAdapter[Any])


def read_fields(cls: type[Any], name: str, value: Any) -> Any:
    """Check plain data and return it as an object of the dataclass `cls`, whose fields have types of this module.

    Raises DataError, which begins with `name`.
    """
    try:
        return _type_adapter(cls).validate_python(value)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as e:
        text = error_sentence(e.errors(include_url=False)[0], "it")
        raise DataError(f"{name}: {text if len(text) <= _ERROR_LENGTH else text[:_ERROR_LENGTH] + '...'}") from None


# --- other input of clients -----------------------------------------------------------------------------------------
def is_request_id(value: Any) -> bool:
    """Return True for a text of 1 to 200 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= NAME_LENGTH and value.isprintable()


def check_tasks(tasks: Any) -> list[dict[str, Any]]:
    """Return the tasks of a command's parcel if all are valid. Raises DataError, which names the invalid one."""
    if not isinstance(tasks, list):
        raise DataError(f"tasks must be a list, not {shown(tasks)}")
    for number, task in enumerate(tasks):
        if not isinstance(task, dict):
            raise DataError(f"task {number} must be a mapping, as task_to_dict makes it, not {shown(task)}")
        workflow, runs = task.get("workflow"), task.get("repeat_times", 1)
        if not isinstance(workflow, str) or len(workflow) > TEXT_LENGTH or not is_storable(workflow):
            raise DataError(f"task {number}: workflow must be a text of at most {TEXT_LENGTH} characters, with no NUL "
                            f"and no lone surrogates, not {shown(workflow)}")
        if not isinstance(runs, int) or isinstance(runs, bool) or not 1 <= runs <= MOST_RUNS:
            raise DataError(f"task {number}: repeat_times must be a whole number from 1 to {MOST_RUNS}, not "
                            f"{shown(runs)}")
    return tasks
