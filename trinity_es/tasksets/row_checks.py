"""Conversion of taskset rows to plain JSON, the same for every kind of file, and their check before a run starts.

Keys whose value is null are left out, in JSONL too, because a table has every key in every row and object, with null
for a missing value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from trinity_es.actors.config.data_sections import FormatConfig, TasksetConfig
from trinity_es.events.errors import DataError, TasksetError, UnknownWorkflow
from trinity_es.events.json_values import with_single_keys, without_nulls
from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS
from trinity_es.workflows.rewards import keys_needed
from trinity_es.workflows.row_prompts import require_prompt_form

__all__ = [
    "CHECKED_ROWS", "RowCheck", "TableRows", "named_keys", "no_prompt_text", "parse_row", "require_named_keys",
    "require_single_keys", "row_name",
]

CHECKED_ROWS = 1000
MANY_KEYS = 50
"""Maximum number of keys of a row that are searched for in its line one by one; a line with more is parsed."""
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def parse_row(line: bytes) -> Any:
    """Return a line of JSON without keys whose value is null. Raises ValueError."""
    try:
        if _LONG_NUMBER.search(line):
            json.loads(line, parse_int=_whole_number)
        return without_nulls(orjson.loads(line))
    except RecursionError:
        raise ValueError("its lists or objects are nested hundreds of levels deep: flatten them") from None


def require_single_keys(line: bytes, row: dict[str, Any]) -> None:
    """Raise ValueError if an object in a row's line of JSON has a key twice.

    Parsing is slow, so a line is parsed only if it contains a key's text twice or has more than `MANY_KEYS` keys.
    """
    if len(row) > MANY_KEYS or any(line.count(orjson.dumps(key)) > 1 for key in row):
        json.loads(line, object_pairs_hook=with_single_keys)


def _whole_number(digits: str) -> int:
    """Return these digits as a number. Raises ValueError if it needs more than 64 bits."""
    number = int(digits) if len(digits) < 40 else 2**64  # Python reads no number with more than 4,300 digits
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits:.40} is a whole number of more than 64 bits, which would be rounded: write it as a "
                         "text")
    return number


class RowCheck:
    """Check of a taskset's rows when its file is opened."""

    def __init__(self, config: TasksetConfig) -> None:
        self._config, self._format = config, config.format
        self._known_names: set[tuple[str, str]] = set()
        """(key, name) of each workflow and reward function in the rows that exists."""
        path = WORKFLOWS.paths.get(config.workflow, config.workflow)
        self._checks_prompts = (path.startswith("trinity_es.") and config.kind in ("file", "hub")
                      and not config.format.workflow_key)
        """True if the prompts are for a ready-made workflow, so they must be text or chat messages."""
        self._keys_by_names: dict[tuple[str, str | None], list[str]] = {}
        """Keys that a row needs, by the names of its workflow and its reward."""

    @property
    def keys(self) -> tuple[str | None, ...]:
        return self._format.prompt_key, self._format.workflow_key, self._format.reward_fn_key

    def check(self, row: dict[str, Any], where: str, details: dict[str, Any]) -> None:
        """Raise TasksetError for a bad prompt, an unknown workflow or reward, or a key missing for the reward."""
        key = self._format.prompt_key
        if row.get(key) is None:
            raise TasksetError(f"{where}: the prompt is null: give one, or remove the row", **details)
        if self._checks_prompts:
            try:
                require_prompt_form(row[key], self._format.reply_prefix)
            except DataError as e:
                raise TasksetError(f"{where}: {e.message} (key {key!r}): fix the value, or remove the row",
                                   **details) from e
        names = ((self._format.workflow_key, WORKFLOWS), (self._format.reward_fn_key, REWARD_FUNCTIONS))
        for name_key, registry in names:
            name: Any = row_name(row, name_key)
            if name is None or (name_key, name) in self._known_names:
                continue
            if not isinstance(name, str):
                raise TasksetError(f"{where}: {name_key} is {name!r}: a name or \"module:name\" is expected", **details)
            try:
                registry.get(name)
            except UnknownWorkflow as e:
                raise TasksetError(f"{where}: {name_key}: {e.message}", **details) from e
            self._known_names.add((str(name_key), name))
        missing = [name for name in self.needed_keys(row) if name not in row]
        if missing:
            raise TasksetError(
                f"{where}: the reward {self._reward_name(row)} needs {', '.join(missing)}, but the row has only "
                f"{', '.join(list(row)[:20])}: set {', '.join(missing)} in reward_fn_args, or add the key to the rows",
                **details)

    def _reward_name(self, row: dict[str, Any]) -> str | None:
        """Return the name of a row's reward, from the row or else the taskset; None: the workflow's default."""
        return row_name(row, self._format.reward_fn_key) or self._config.reward_fn

    def needed_keys(self, row: dict[str, Any]) -> list[str]:
        """Return the keys that a row's reward needs; [] if the reward or the workflow can't be found."""
        workflow_name = row_name(row, self._format.workflow_key) or self._config.workflow
        reward_name = self._reward_name(row)
        names = workflow_name, reward_name
        if not all(isinstance(name, str | None) for name in names):
            return []  # `check` reports it
        if names not in self._keys_by_names:
            try:
                workflow = WORKFLOWS.get(workflow_name)
                reward = reward_name or getattr(workflow, "default_reward", None)
                args = self._config.reward_fn_args
                self._keys_by_names[names] = keys_needed(workflow, REWARD_FUNCTIONS.get(reward), args) if reward else []
            except UnknownWorkflow:  # `Config.check` reports it
                self._keys_by_names[names] = []
        return self._keys_by_names[names]


def row_name(row: dict[str, Any], key: str | None) -> str | None:
    """Return the workflow or reward that the row names at `key`; None if the key is None or not in the row."""
    return None if key is None else row.get(key)


def no_prompt_text(key: str, row_keys: Sequence[str]) -> str:
    return (f"no prompt: the key {key!r} is missing (there are: {', '.join(row_keys[:8]) or 'no keys'}); set the "
            "taskset's format.prompt_key to the key that holds the prompt")


def named_keys(config: TasksetConfig) -> dict[str, str]:
    """Return {key of `format`: row key} for the row keys that the config names, except the prompt's."""
    default = FormatConfig()
    return {name: key for name in ("response_key", "workflow_key", "reward_fn_key")
            if (key := getattr(config.format, name)) != getattr(default, name)}


def require_named_keys(file: object, keys: Iterable[str], config: TasksetConfig) -> None:
    """Raise TasksetError if a key that `format` names is in no row. `keys`: keys of all rows."""
    for name, key in named_keys(config).items():
        if key not in keys:
            raise TasksetError(f"{file}: no row has the key {key!r} of format.{name} (there are: "
                               f"{', '.join(list(keys)[:8])}): name one of these, or remove format.{name}",
                               file=str(file))


# --- columns of Arrow -------------------------------------------------------------------------------------------------
class TableRows:
    """Reader of rows from Arrow tables of one schema. Raises TasksetError for a column without a JSON form."""

    def __init__(self, source: object, schema: Any, config: TasksetConfig) -> None:
        self._source, self._row_check = source, RowCheck(config)
        if config.format.prompt_key not in schema.names:
            raise TasksetError(f"{source}: {no_prompt_text(config.format.prompt_key, schema.names)}", file=str(source))
        repeated_names = [name for name in schema.names if schema.names.count(name) > 1]
        if repeated_names:
            raise TasksetError(f"{source}: column {repeated_names[0]!r} appears twice: rename or remove one",
                               file=str(source))
        require_named_keys(source, schema.names, config)
        self._readers: dict[str, Callable[[Any], Any]] = {}
        for field in schema:
            try:
                self._readers[field.name] = _json_converter(field.type)
            except TypeError as e:
                raise TasksetError(f"{source}: column {field.name!r} has the type {e}, which JSON can't hold: "
                                   "remove or convert the column", file=str(source)) from e

    def check(self, table: Any, first: int) -> None:
        """Check the rows of a table, numbered from `first`. Raises TasksetError, which names the row.

        Columns whose type can't hold an invalid value are not converted to Python.
        """
        checked_names = [field.name for field in table.schema
                         if _may_fail(field.type) or field.name in self._row_check.keys]
        for name in self._readers.keys() - set(checked_names):
            try:
                table.column(name).validate(full=True)
            except ValueError as e:  # pyarrow's errors are among them
                raise TasksetError(f"{self._source}: column {name!r}: {e}: fix the values, or remove the column",
                                   file=str(self._source)) from e
        for begin in range(0, table.num_rows, CHECKED_ROWS):
            part = table.slice(begin, CHECKED_ROWS)
            for index in range(part.num_rows):
                number = first + begin + index
                # Convert as few columns as the check needs; which ones its reward needs may depend on the row.
                row = self._row_values(part, index, number, checked_names)
                needed_keys = self._readers.keys() & set(self._row_check.needed_keys(row))
                row |= self._row_values(part, index, number, needed_keys - row.keys())
                if not row.keys() >= set(self._row_check.needed_keys(row)):  # errors name all keys of the row
                    row = self._row_values(part, index, number, self._readers)
                self._row_check.check(row, f"{self._source} row {number}", {"file": str(self._source), "row": number})

    def row(self, table: Any, index: int, number: int) -> dict[str, Any]:
        """Return the row at `index` of a table as JSON; `number` names it in errors."""
        return self._row_values(table, index, number, self._readers)

    def _row_values(self, table: Any, index: int, number: int, names: Iterable[str]) -> dict[str, Any]:
        """Return a row's values in these columns as JSON, without nulls. Raises TasksetError for a bad value."""
        values: dict[str, Any] = {}
        for name in names:
            try:
                python_value = table.column(name)[index].as_py()
                value = None if python_value is None else self._readers[name](python_value)
                if value is not None:
                    values[name] = value
            except (ValueError, OverflowError) as e:
                message = str(e).partition(" Install pandas")[0]  # for nanoseconds
                raise TasksetError(f"{self._source} row {number}: column {name!r}: {message}: fix the value, or remove "
                                   "the row", file=str(self._source), row=number) from e
        return values


def _json_converter(arrow_type: Any) -> Callable[[Any], Any]:
    """Return a function that converts values of this Arrow type to JSON. Raises TypeError if JSON has no such type.

    Bytes become text, since some tables store text as bytes. Floats of 16 and 32 bits keep their short form: 0.1, not
    the nearest 64-bit float. NaN, which pandas writes for a missing value, becomes null. Whole decimals become whole
    numbers, others exact texts. Dates and times become ISO 8601 texts.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(arrow_type):
        return _json_converter(arrow_type.value_type)
    if isinstance(arrow_type, pyarrow.BaseExtensionType):
        return _json_converter(arrow_type.storage_type)
    if types.is_struct(arrow_type):
        readers = {field.name: _json_converter(field.type) for field in arrow_type}
        return partial(_struct_object, readers=readers)
    if types.is_map(arrow_type):
        read_key, read_value = _json_converter(arrow_type.key_type), _json_converter(arrow_type.item_type)
        return lambda pairs: without_nulls(with_single_keys(
            [(str(read_key(key)), None if value is None else read_value(value)) for key, value in pairs]))
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type):
        read_item = _json_converter(arrow_type.value_type)
        return lambda value: [None if item is None else read_item(item) for item in value]
    if types.is_floating(arrow_type):
        if types.is_float64(arrow_type):
            return _finite_or_none
        numpy_type = arrow_type.to_pandas_dtype()
        return lambda value: _finite_or_none(float(str(numpy_type(value))))
    if _is_bytes(arrow_type):
        return _utf8_text
    if types.is_decimal(arrow_type):
        return int if arrow_type.scale <= 0 else str
    if types.is_date(arrow_type) or types.is_time(arrow_type) or types.is_timestamp(arrow_type):
        return lambda value: value.isoformat()
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_null(arrow_type):
        return lambda value: value
    if str(arrow_type) in ("string", "large_string", "string_view"):
        return lambda value: value
    raise TypeError(str(arrow_type))


def _struct_object(value: dict[str, Any], *, readers: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    members = {name: read_value(value[name]) for name, read_value in readers.items() if value[name] is not None}
    return {name: member for name, member in members.items() if member is not None}


def _is_bytes(arrow_type: Any) -> bool:
    return str(arrow_type).partition("[")[0] in ("binary", "large_binary", "binary_view", "fixed_size_binary")


def _may_fail(arrow_type: Any) -> bool:
    """Return whether some values of this Arrow type lack a JSON form."""
    import pyarrow

    types = pyarrow.types
    inner_types = [arrow_type.field(i).type for i in range(arrow_type.num_fields)]
    return (
        any(map(_may_fail, inner_types)) or _is_bytes(arrow_type)
        or types.is_floating(arrow_type) or types.is_temporal(arrow_type)
        or types.is_map(arrow_type) or types.is_dictionary(arrow_type)
        or isinstance(arrow_type, pyarrow.BaseExtensionType)
    )


def _finite_or_none(value: float) -> float | None:
    """Return a float; None for NaN. Raises ValueError for infinity, which JSON can't hold."""
    if math.isinf(value):
        raise ValueError(f"JSON can't hold {value}")
    return None if math.isnan(value) else value


def _utf8_text(value: bytes) -> str:
    """Return bytes as text. Raises ValueError unless they are UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"the bytes are not UTF-8 (byte {e.start}), so JSON can't hold them") from None
