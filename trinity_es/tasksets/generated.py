"""Tasks of reasoning-gym, generated on demand from a seed and kept in memory.

A row has the question and the answer under the keys of the taskset's `format`, and the scorer's data as `entry`.
"""

from __future__ import annotations

import ast
import datetime
import math
from collections.abc import Sequence
from typing import Any

import orjson

from trinity_es.actors.config.data_sections import SCORER, TasksetConfig
from trinity_es.events.errors import DataError, TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets import reasoning_gym

__all__ = ["Generated", "with_scorer"]


class Generated:
    """Rows of a reasoning-gym family of puzzles. Raises TasksetError, which says what to install or to change."""

    def __init__(self, config: TasksetConfig, recorded: TasksetSource | None = None) -> None:
        # `open_source` passes `recorded` to every kind of taskset; this kind has one installed revision, and no choice.
        self._config = config
        self._rows: dict[int, bytes] = {}
        """Rows made so far, as JSON."""
        try:
            self._dataset = reasoning_gym.dataset(config.path.partition(":")[2], config.args)
            self.revision = reasoning_gym.installed_version()
        except DataError as e:
            raise TasksetError(f"taskset {config.name}: {e}") from e
        self.read([0])  # now, so that args of which the family can make no row fail at the start

    @staticmethod
    def check(config: TasksetConfig) -> None:
        """Raise DataError unless reasoning-gym is installed."""
        reasoning_gym.system_prompt()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        for row in rows:
            if row not in self._rows:
                self._rows[row] = orjson.dumps(self._make_row(row))
        return [orjson.loads(self._rows[row]) for row in rows]

    def _make_row(self, row: int) -> dict[str, Any]:
        try:
            entry = self._dataset[row]
            keys = self._config.format
            return {
                keys.prompt_key: entry["question"], keys.response_key: entry["answer"],
                "entry": _entry_literal(entry),
            }
        except Exception as e:  # a family may raise anything
            raise TasksetError(
                f"taskset {self._config.name}: {self._config.path} can't make row {row} ({type(e).__name__}: {e}): "
                "change the taskset's args", row=row,
            ) from e


def _entry_literal(entry: dict[str, Any]) -> str:
    """Return an entry without its question as a Python literal. JSON will not do, since some scorers need tuples.

    If a value has no literal, the whole entry is converted to JSON values first.
    """
    scorer_data = {key: value for key, value in entry.items() if key != "question"}
    try:
        if ast.literal_eval(repr(scorer_data)) == scorer_data:
            return repr(scorer_data)
    except (SyntaxError, ValueError):  # it holds values other than literals
        pass
    return repr(orjson.loads(orjson.dumps(_as_json(scorer_data))))


def _as_json(value: Any) -> Any:
    """Return a value in JSON's types. NaN becomes null; a value of another type becomes text."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return str(value)  # orjson writes at most 64 bits
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    return str(value)


def with_scorer(config: TasksetConfig) -> TasksetConfig:
    """Return the config of a reasoning-gym taskset with reasoning-gym's scorer and system prompt where it sets none."""
    update: dict[str, Any] = {}
    if config.reward_fn is None:
        made_from = {"family": config.path.partition(":")[2], "args": config.args}
        update = {"reward_fn": SCORER, "reward_fn_args": {**config.reward_fn_args, **made_from}}
    if config.format.system_prompt is None:
        update["format"] = config.format.model_copy(update={"system_prompt": reasoning_gym.system_prompt()})
    return config.model_copy(update=update)
