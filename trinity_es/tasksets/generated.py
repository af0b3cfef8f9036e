"""Tasks that reasoning-gym makes: a row is made when it is asked for, the same for the same seed, and kept.

A row holds the question and the answer under the keys of the taskset's `format`, and as `entry` what the scorer needs.
"""

from __future__ import annotations

import ast
import datetime
import math
from collections.abc import Sequence
from typing import Any

import orjson

from trinity_es.actors.config.buffer import SCORER, TasksetConfig
from trinity_es.events.errors import DataError, TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets import reasoning_gym

__all__ = ["Generated", "completed"]


class Generated:
    """The rows of a family of reasoning-gym. Raises TasksetError, which says what to install or to change."""

    def __init__(self, config: TasksetConfig, recorded: TasksetSource | None = None) -> None:
        self._config, self._rows = config, dict[int, bytes]()
        try:
            self._dataset = reasoning_gym.dataset(family_of(config), config.args)
            self.revision = reasoning_gym.installed_version()
        except DataError as e:
            raise TasksetError(f"taskset {config.name}: {e}") from e
        self.read([0])

    @staticmethod
    def check(config: TasksetConfig) -> None:
        """Require the package reasoning-gym. Raises DataError."""
        reasoning_gym.system_prompt()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows, in this order. Raises TasksetError for one that can't be made."""
        for row in rows:
            if row not in self._rows:
                self._rows[row] = orjson.dumps(self._made(row))
        return [orjson.loads(self._rows[row]) for row in rows]

    def _made(self, row: int) -> dict[str, Any]:
        try:
            entry = self._dataset[row]
            keys = self._config.format
            return {
                keys.prompt_key: entry["question"], keys.response_key: entry["answer"],
                "entry": _written(entry),
            }
        except Exception as e:  # whatever a family raises
            raise TasksetError(
                f"taskset {self._config.name}: {self._config.path} can't make row {row} ({type(e).__name__}: {e}): "
                "change args", row=row,
            ) from e


def _written(entry: dict[str, Any]) -> str:
    """Return an entry, but for its question, as Python writes it: some scorers need the tuples that JSON has not.

    What Python could not read again goes through JSON first.
    """
    kept = {key: value for key, value in entry.items() if key != "question"}
    try:
        if ast.literal_eval(repr(kept)) == kept:
            return repr(kept)
    except (SyntaxError, ValueError):  # it holds other things than literals
        pass
    return repr(orjson.loads(orjson.dumps(_plain(kept))))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN is null, what JSON has not is text."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return str(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    return str(value)


def family_of(config: TasksetConfig) -> str:
    return config.path.partition(":")[2]


def completed(config: TasksetConfig) -> TasksetConfig:
    """Return a taskset of reasoning-gym with its scorer and its system prompt, where none are given."""
    update: dict[str, Any] = {}
    if config.reward_fn is None:
        made_from = {"family": family_of(config), "args": config.args}
        update = {"reward_fn": SCORER, "reward_fn_args": {**config.reward_fn_args, **made_from}}
    if config.format.system_prompt is None:
        prompt = reasoning_gym.system_prompt()
        update["format"] = config.format.model_copy(update={"system_prompt": prompt})
    return config.model_copy(update=update)
