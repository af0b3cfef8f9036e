"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in the texts of a config, resolved as OmegaConf does.

What comes of one is a text, also where it looks like a number: a key that wants a number or a flag converts it (see
`converted`). A default is the text that stands there, a text in quotes, another `${oc.env:...}`, or `null`. `\\${` is
the text `${`. Nothing else may stand in `${...}` but the name of a task's secret, `${secret:...}`, which is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from trinity_es.config.error_lines import Path_
from trinity_es.events.secrets import Secret, is_reference, is_secret_key, marked_text

__all__ = ["converted", "escaped", "resolved"]

_OPEN = re.compile(r"(\\*)\$\{")
_RESOLVER = re.compile(r"\s*oc\.env\s*:")
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'\s*|\"((?:[^\"\\]|\\.)*)\"\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=,'\"\s])")
_TRUE, _FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


class _Refused(Exception):
    """Why an interpolation can't be resolved, as the rest of a sentence that begins with the key."""


def resolved(value: Any, path: Path_ = ()) -> tuple[Any, dict[Path_, str], set[Path_]]:
    """Return a config's data with its texts resolved, what is wrong at which path, and the paths of resolved texts.

    A text for which a variable with the name of a secret was read is a `Secret`.
    """
    if isinstance(value, Secret) or is_reference(value) or marked_text(value) is not None:
        return value, {}, set()
    if isinstance(value, str):
        text = _Text(value, quotable=not (path and is_secret_key(str(path[-1]))))
        try:
            found = text.read()
        except _Refused as e:
            return value, {path: str(e)}, set()
        return found, {}, {path} if text.resolved else set()
    if not isinstance(value, Mapping | list):
        return value, {}, set()
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = {key: resolved(one, (*path, key)) for key, one in items}
    problems = {at: problem for _, wrong, _ in inner.values() for at, problem in wrong.items()}
    texts = {at for _, _, paths in inner.values() for at in paths}
    data = {key: one for key, (one, _, _) in inner.items()}
    return data if isinstance(value, Mapping) else list(data.values()), problems, texts


def escaped(value: Any) -> Any:
    """Return data from which `resolved` makes this again."""
    if isinstance(value, Secret) or is_reference(value) or marked_text(value) is not None:
        return value
    if isinstance(value, Mapping):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(one) for one in value]
    return _OPEN.sub(lambda m: rf"{2 * m[1]}\${{", value) if isinstance(value, str) else value


def converted(text: str, expected: str) -> Any:
    """Return a resolved text as the number or flag that a key wants; `expected` is the type of pydantic's error.

    Raises ValueError where it is none.
    """
    if expected == "bool_type" and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if expected in ("int_type", "float_type"):
        return int(text) if expected == "int_type" else float(text)
    raise ValueError(expected)


class _Text:
    """One text of a config, read from its beginning to its end."""

    def __init__(self, text: str, *, quotable: bool) -> None:
        """`quotable`: an error may quote it."""
        self.text, self.quotable, self.at = text, quotable, 0
        self.resolved = False
        """An interpolation was found."""
        self.secret = False

    def read(self) -> str | None:
        """Return what it stands for: None where its one interpolation has the default `null`."""
        alone = False
        pieces: list[str | None] = []
        while found := _OPEN.search(self.text, self.at):
            backslashes = len(found[1])
            before = self.text[self.at : found.start()] + backslashes // 2 * "\\"
            self.at = found.end()
            if backslashes % 2:
                pieces.append(f"{before}${{")
            else:
                pieces += [before, self._interpolation(found.start() + backslashes)]
                alone = not before and len(pieces) == 2 and self.at == len(self.text)
        whole = pieces[1] if alone else "".join(map(str, [*pieces, self.text[self.at :]]))
        return Secret(whole) if self.secret and whole is not None else whole

    def _interpolation(self, start: int) -> str | None:
        """Return what the one stands for that was opened at `start`, and go to its end."""
        resolver = _RESOLVER.match(self.text, self.at)
        if resolver is None:
            raise _Refused(
                f"holds {self._quoted(start)}, which is not resolved here: only ${{oc.env:NAME}} and "
                "${oc.env:NAME,default} are, and \\${ is the text ${ itself"
            )
        self.at = resolver.end()
        given = [self._argument(start)]
        while self.text[self.at - 1] == ",":
            given.append(self._argument(start))
        name = given[0]
        if not name or len(given) > 2:
            raise self._malformed(start)
        self.resolved = True
        self.secret |= is_secret_key(name)
        if name in os.environ:
            return os.environ[name]
        if len(given) == 1:
            raise _Refused(
                f"needs the environment variable {name}, which is not set: set it, or write a default, as in "
                f"${{oc.env:{name},default}}"
            )
        return given[1]

    def _argument(self, start: int) -> str | None:
        """Return a name or a default, and go behind the comma or brace at its end."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if quote := _QUOTED.match(self.text, self.at):
            body = quote[1] if quote[2] is None else quote[2]
            inner = _Text(re.sub(r"\\(['\"])", r"\1", body), quotable=self.quotable)
            self.at = quote.end()
            whole = inner.read()
            self.secret |= inner.secret
            if self.text[self.at : self.at + 1] not in (",", "}"):
                raise self._malformed(start)
            self.at += 1
            return str(whole)
        pieces: list[str | None] = []
        while (at := self.text[self.at : self.at + 1]) not in (",", "}"):
            if opened := re.compile(r"\$\{").match(self.text, self.at):
                self.at = opened.end()
                pieces.append(self._interpolation(opened.start()))
            elif kept := _ESCAPED.match(self.text, self.at):
                self.at = kept.end()
                pieces.append(kept[1])
            elif at in ("", "{", "[", "]", "'", '"'):
                raise self._malformed(start)
            else:
                self.at += 1
                pieces.append(at)
        self.at += 1
        if len(pieces) == 1:
            return pieces[0]
        whole = "".join(map(str, pieces)).strip()
        return None if whole.lower() == "null" else whole

    def _malformed(self, start: int) -> _Refused:
        return _Refused(
            f"holds {self._quoted(start)}, which can't be read: write ${{oc.env:NAME}} or ${{oc.env:NAME,default}}, "
            "with a default in quotes where it holds a comma, a bracket, a brace or a quote"
        )

    def _quoted(self, start: int) -> str:
        """Return the interpolation that was opened at `start`, without a default, which may be a secret."""
        head = re.match(r"\$\{([\w.]+\}|oc\.env:\w+|[\w.]+:)", self.text[start:])
        if head is None or not self.quotable:
            return "${...}"
        return head[0] if head[0].endswith("}") else f"{head[0]}...}}"
