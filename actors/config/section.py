"""Base class of the config's sections, and the types of their fields with the checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapValidator, field_validator

from trinity_es.events.errors import DataError
from trinity_es.events.secrets import Secret, unmarked
from trinity_es.events.values import require_finite

__all__ = ["Args", "ClassPath", "FileName", "ImportName", "Positive", "Seconds", "Section", "Text", "must_match"]


def _check_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with each marked secret as a `Secret`. Raises ValueError if JSON can't hold the mapping."""
    value = unmarked(value)
    try:
        require_finite(value)
        orjson.dumps(value)
    except (DataError, TypeError) as e:
        raise ValueError(f"must hold plain values only (numbers, text, lists, mappings with text keys): {e}") from e
    return dict(value)


def _check_text(value: Any, check: Callable[[Any], str]) -> str:
    """Return the text if pydantic's `check` accepts it, a marked secret as a `Secret`."""
    value = unmarked(value)
    return Secret(check(value)) if isinstance(value, Secret) else check(value)


def must_match(pattern: str, form: str) -> AfterValidator:
    """Return a validator of texts that must match `pattern` as a whole; `form` describes them in its error."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {form}, not {value!r}")
        return value

    return AfterValidator(check)


Args = Annotated[dict[str, Any], AfterValidator(_check_plain)]
"""Arguments of another class, as plain JSON values."""
Text = Annotated[str, WrapValidator(_check_text)]
"""A text. If it is a secret, it is a `Secret`."""
FileName = Annotated[str, must_match(r"\w[\w.\- ]*", "usable as a folder name (letters, digits, _ - .)")]
ImportName = Annotated[str, must_match(r"[\w.]+(:[\w.]+)?", 'a registered name or "module:Class"')]
ClassPath = Annotated[str, must_match(r"[\w.]+:[\w.]+", '"module:name"')]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and strict about unknown keys and wrong types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True,
        protected_namespaces=(),
    )

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must fit into a signed 64-bit integer, since the log records it: give a smaller number")
        return value
