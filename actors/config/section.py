"""What the sections of the config are made of: their base, and the types of fields with their checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapValidator, field_validator

from trinity_es.events.errors import DataError
from trinity_es.events.secrets import Secret, unmarked
from trinity_es.events.values import require_finite

__all__ = ["Args", "ClassPath", "FileName", "ImportName", "Positive", "Seconds", "Section", "Text"]


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    value = unmarked(value)
    try:
        require_finite(value)
        orjson.dumps(value)
    except (DataError, TypeError) as e:
        raise ValueError(f"must hold plain values only (numbers, text, lists, mappings with text keys): {e}") from e
    return dict(value)


def _text(value: Any, checked: Callable[[Any], str]) -> str:
    value = unmarked(value)
    return Secret(checked(value)) if isinstance(value, Secret) else checked(value)


def _file_name(value: str) -> str:
    if not re.fullmatch(r"\w[\w.\- ]*", value):
        raise ValueError(f"must be usable as a folder name (letters, digits, _ - .), not {value!r}")
    return value


def _importable(value: str) -> str:
    if not re.fullmatch(r"[\w.]+(:[\w.]+)?", value):
        raise ValueError(f"must be a registered name or \"module:Class\", not {value!r}")
    return value


def _class_path(value: str) -> str:
    if not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError(f"must be \"module:name\", not {value!r}")
    return value


Args = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Arguments that are handed on as they are: plain JSON values."""
Text = Annotated[str, WrapValidator(_text)]
"""A text that stays a secret where a secret was put into it."""
FileName = Annotated[str, AfterValidator(_file_name)]
ImportName = Annotated[str, AfterValidator(_importable)]
ClassPath = Annotated[str, AfterValidator(_class_path)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types refused, never changed."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True,
        validate_by_name=True, validate_by_alias=True, protected_namespaces=(),
    )

    @field_validator("*")
    @classmethod
    def _require_recordable(cls, value: Any) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must be a whole number that fits into 64 bits with its sign: it is recorded in the log")
        return value
