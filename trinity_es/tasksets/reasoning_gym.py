"""Datasets and scorers of reasoning-gym, whose families of puzzles are generated from a seed.

A taskset with `path: reasoning_gym:leg_counting` reads one (`trinity_es.tasksets.generated`); `Score` is its reward.
The package is imported on use: `pip install 'trinity-es[reasoning-gym]'`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean
from trinity_es.events.errors import DataError

__all__ = ["Score", "dataset", "installed_version", "system_prompt"]


class Score:
    """Reward of a reasoning-gym task: the score of the family's own scorer, mostly 0 to 1.

    The answer is the content of the last `<answer>...</answer>` in a response, as reasoning-gym extracts it; a response
    without the tag is scored as None. `answer_tag` sets another tag; None: the whole response is the answer.
    """

    grader_timeout: float | None = 30.0
    """Time limit of a scorer in seconds: some solve equations that the model wrote."""
    grader_imports = "reasoning_gym"
    """Module that graders import before they are forked: the import takes over a second."""

    def __init__(self, *, family: str, args: Mapping[str, Any], answer_tag: str | None = "answer") -> None:
        self._family, self._tag = family, answer_tag
        self._args = json.dumps(args, sort_keys=True)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], entry: Sequence[str], **columns: Any
    ) -> list[float]:
        """Return the score of each completion, called like a TRL reward. Raises the scorer's errors.

        `entry`: reasoning-gym's entries as Python literals.
        """
        return [self._score_one(*arguments) for arguments in zip(prompts, completions, entry, strict=True)]

    def _score_one(self, prompt: Any, completion: Any, entry: str) -> float:
        """Return the score of a completion, a text or chat messages that end with the answer, for this entry."""
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        answer = text if self._tag is None else _require_package().utils.extract_answer(text, tag_name=self._tag)
        full_entry = {"question": prompt, **ast.literal_eval(entry)}
        return float(_dataset(self._family, self._args).score_answer(answer, full_entry))


def dataset(family: str, args: Mapping[str, Any]) -> Any:
    """Return reasoning-gym's dataset of a family with these arguments. Its entries are generated on demand.

    The default `seed` is 0. Raises DataError for an unknown family, wrong arguments, or a missing package.
    """
    return _dataset(family, json.dumps(args, sort_keys=True))


def installed_version() -> str:
    return importlib.metadata.version("reasoning-gym")


def system_prompt() -> str:
    """Return reasoning-gym's own system prompt, which asks for the answer between `<answer>` and `</answer>`."""
    return str(_require_package().utils.SYSTEM_PROMPTS["default"])


@functools.lru_cache(maxsize=64)
def _dataset(family: str, args: str) -> Any:
    """Return the dataset of a family, or of the several families of `composite`. `args` is JSON."""
    arguments: dict[str, Any] = {"seed": 0, **json.loads(args)}
    if family == "composite":
        _require_package()
        dataset_spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
        parts = arguments.get("datasets") or []
        if not isinstance(parts, list):
            parts = [parts]
        arguments["datasets"] = [dataset_spec(**_checked_family(part)) for part in parts]
    return _make_dataset(family, arguments)


def _make_dataset(family: str, arguments: Mapping[str, Any]) -> Any:
    gym = _require_package()
    families = importlib.import_module("reasoning_gym.factory").DATASETS
    if family not in families:
        some_names = difflib.get_close_matches(family, families, n=3) or sorted(families)[:3]
        raise DataError(f"reasoning-gym {installed_version()} has no family {family!r}: {', '.join(some_names)} are "
                        f"some of its {len(families)} families")
    parameters = [field.name for field in dataclasses.fields(families[family][1])]
    _require_names(f"reasoning_gym:{family}", arguments, parameters)
    try:
        return gym.create_dataset(family, **arguments)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as e:
        settings = ", ".join(f"{name} = {value!r}" for name, value in arguments.items() if name != "datasets")
        raise DataError(f"reasoning_gym:{family} refuses {settings}: {e}") from e


def _checked_family(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("config", {}), dict) or type(part.get("name")) is not str:
        raise DataError(f"a dataset of reasoning_gym:composite is {part!r}: give {{name: FAMILY}}, with weight and "
                        f"config if they are not 1 and {{}}")
    _require_names("a family of reasoning_gym:composite", part, ["name", "weight", "config"])
    _make_dataset(part["name"], part.get("config", {}))  # its error names the family and the argument
    return {"weight": 1.0, "config": {}, **part}


def _require_names(owner: str, arguments: Mapping[str, Any], parameters: Sequence[str]) -> None:
    for name in arguments:
        if name not in parameters:
            raise DataError(f"{owner} has no parameter {name!r}: its parameters are {', '.join(parameters)}"
                            f"{did_you_mean(name, parameters)}")


def _require_package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib's, which it imports
            return importlib.import_module("reasoning_gym")
    except ImportError as e:
        raise DataError(
            f"reasoning-gym can't be imported ({e}): `pip install 'trinity-es[reasoning-gym]'`"
        ) from e
