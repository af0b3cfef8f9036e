"""Detection of secrets in configs and tasks, and the private file that keeps the secrets of tasks.

A value is a secret because of its key, its type (`Secret`, pydantic's SecretStr) or its form (a bearer token, an API
key, a URL with a password). A recorded config has `***` in its place. A recorded task has a reference, `${secret:...}`,
because the task may run again. The private file has the value, and the runner restores it just before the workflow gets
the task.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets as randomness
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from trinity_es.events.errors import DataError
from trinity_es.events.private_files import make_private_folder, open_private, take_lock

__all__ = [
    "MASK", "SECRET_KEYS", "Secret", "SecretFile", "is_reference", "is_secret", "is_secret_key", "marked",
    "marked_text", "mask", "masked_keys", "masked_text", "replaced", "unmarked",
]

MASK = "***"

SECRET_KEYS = (
    "api_key", "apikey", "access_key", "secret_key", "private_key", "signing_key", "encryption_key", "auth_key",
    "account_key", "subscription_key", "wandb_key", "secret", "password", "passwd", "passphrase", "pwd", "token",
    "authorization", "auth", "bearer", "cookie", "credential", "credentials", "connection_string", "pat", "dsn",
    "webhook", "webhook_url",
)
"""Keys that mark a secret, alone or after an underscore: `hf_token`, `OPENAI_API_KEY`, `X-Api-Key`."""

_WITHOUT_PLURAL = ("token", "auth", "pwd", "authorization", "credentials")
_PLURALS = tuple(f"{key}s" for key in SECRET_KEYS if key not in _WITHOUT_PLURAL)
"""Keys of several secrets, such as `api_keys`. Plain `tokens` is left out, because it means a model's tokens."""
_TOKENS_KEYS = tuple(f"{kind}_tokens" for kind in ("api", "auth", "access", "refresh", "bearer", "hf"))
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*_KEYS?")
"""Name of an environment variable that holds a key: `OPENAI_KEY`."""

NO_SECRETS = re.compile(
    r"(^|_)(pad|padding|eos|bos|unk|sep|cls|mask|stop|image|video|audio|think|thinking|start|end|begin|special|per|"
    r"prompt|response|max|min|separator)_?token$"
)
"""Keys that end with `token` and mean a token of a model's vocabulary."""

_PLACEHOLDER = re.compile(r"<[^>]*>|\[[A-Z]+\]|\$\{[^}]*\}|env:\w+")
_SECRET_FORM = re.compile(
    r"(?i:bearer |basic )\S{8,}|(sk|pk|rk)-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abpr]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"
)
_SECRET_IN_TEXT = re.compile(
    r"(?i:authorization)['\"]?\s*[:=]\s*['\"]?(?i:bearer|basic)\s+(?P<value>[^\s'\"]{8,})|"
    r"(?P<key>\b(sk|rk)-[A-Za-z0-9_-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[A-Z0-9]{16}\b)"
)
"""Secret inside a longer text. Stricter than `_SECRET_FORM`, because a prompt may mention tokens and bearers."""
_URL_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@:]*:([^\s/@]+)@\S*$", re.IGNORECASE)
_URL_PASSWORDS = re.compile(r"(?<=://)[^\s/@:]*:([^\s/@]+)@")
"""Passwords of URLs inside a longer text."""
_REFERENCE = re.compile(r"\$\{secret:([0-9a-f]{24})\}")
_MARK = "$secret"
SHORT = 6
"""Minimum length of a secret to be masked in other texts. Shorter ones occur by chance."""
LOCK_SECONDS = 10.0
"""Maximum wait for the lock of the secrets file, which a process normally holds for some milliseconds."""


class Secret(str):
    """Text that is a secret under any key."""

    __slots__ = ()


@lru_cache(4096)  # tasks have the same keys, thousands of times
def is_secret_key(key: str) -> bool:
    """Return True if a key marks a secret, in any spelling: `hf_token`, `hfToken`, `X-Api-Key`, `OPENAI_KEY`."""
    if _VARIABLE.fullmatch(key):
        return True
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()).strip("_")
    secret_keys = (*SECRET_KEYS, *_PLURALS, *_TOKENS_KEYS)
    is_secret_name = any(name == secret or name.endswith(f"_{secret}") for secret in secret_keys)
    return is_secret_name and not NO_SECRETS.search(name)


def is_secret(key: str, value: Any) -> bool:
    """Return True if a value under this key is a secret. Numbers, booleans and empty texts never are."""
    if isinstance(value, Secret):
        return True
    if not isinstance(value, str) or not value or value == MASK or is_reference(value):
        return False
    if is_secret_key(key) and not _PLACEHOLDER.fullmatch(value):
        return True
    return bool(_SECRET_FORM.fullmatch(value) or _URL_PASSWORD.match(value) or _SECRET_IN_TEXT.search(value))


def replaced(value: Any, by: Callable[[str], str], key: str = "") -> Any:
    """Return a copy of a JSON value in which `by(secret)` replaces every secret. `key` is the key of the value.

    Values in a list count as under the list's key. So do values of a dict under a secret's key (`api_keys: {openai:
    ...}`).
    """
    if isinstance(value, Mapping):
        if (text := marked_text(value)) is not None:
            return by(text)
        is_all_secret = is_secret_key(key)
        return {k: replaced(v, by, key if is_all_secret else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(v, by, key) for v in value]
    return by(str(value)) if is_secret(key, value) else value


def marked(value: Any) -> Any:
    """Return a copy of a JSON value with each `Secret` as `{"$secret": text}`, so that JSON preserves the type."""
    if isinstance(value, Secret):
        return {_MARK: str(value)}
    if isinstance(value, Mapping):
        return {k: marked(v) for k, v in value.items()}
    return [marked(v) for v in value] if isinstance(value, list | tuple) else value


def unmarked(value: Any) -> Any:
    """Reverse `marked`, and turn each SecretStr of pydantic into a `Secret`."""
    if isinstance(value, Mapping):
        text = marked_text(value)
        return {k: unmarked(v) for k, v in value.items()} if text is None else Secret(text)
    if isinstance(value, list | tuple):
        return [unmarked(v) for v in value]
    get_secret = getattr(value, "get_secret_value", None)
    return value if get_secret is None else Secret(get_secret())


def marked_text(value: Any) -> str | None:
    """Return the text of `{"$secret": text}`, or None for any other value."""
    text = value.get(_MARK) if isinstance(value, Mapping) and len(value) == 1 else None
    return text if isinstance(text, str) else None


def is_reference(value: Any) -> bool:
    """Return True for a reference to a task's secret, `${secret:...}`."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def mask(value: Any) -> Any:
    """Return a copy of a JSON value with every secret and every password in a URL masked."""
    return replaced(value, _mask_text)


def _mask_text(value: str) -> str:
    """Mask the password in a URL or the secrets in a longer text. If the text has neither, mask all of it."""
    if type(value) is not str or _SECRET_FORM.fullmatch(value):  # a `Secret`, or one by its form
        return MASK
    if password := _URL_PASSWORD.search(value):
        return value[: password.start(1)] + MASK + value[password.end(1) :]
    masked = _mask_within(value)
    return MASK if masked == value else masked


def _mask_within(text: str) -> str:
    return _SECRET_IN_TEXT.sub(lambda m: m[0].replace(m["value"] or m["key"], MASK), text)


def masked_text(text: str, environment: Mapping[str, str]) -> str:
    """Return a text, such as a program's error, with `***` for this environment's secrets and what looks like one."""
    for name, value in environment.items():
        if name != "PWD" and is_secret_key(name) and len(value) >= SHORT:
            text = text.replace(value, MASK)
    return _mask_within(_URL_PASSWORDS.sub(lambda m: m[0].replace(m[1], MASK), text))


def masked_keys(value: Any, path: str = "") -> list[str]:
    """Return the paths of the values that `mask` changed, such as `servers[0].api_key`. `path`: that of the value."""
    if isinstance(value, Mapping):
        parts = [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return [path] if isinstance(value, str) and MASK in value else []
    return [masked_path for part_path, inner in parts for masked_path in masked_keys(inner, part_path)]


class SecretFile:
    """Private file with the secrets of tasks. Each line holds a name and a value."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / "secrets"
        self._values: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """Store the secrets in a task's fields, and return the fields with references. Raises DataError."""
        return replaced(value, self._store)

    def reveal(self, value: Any) -> Any:
        """Return a task's fields with its secrets in place of references. Raises DataError for one not in the file."""
        if isinstance(value, dict):
            return {k: self.reveal(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.reveal(v) for v in value]
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return value if reference is None else self._look_up(reference[1])

    def scrubbed(self, text: str) -> str:
        """Return a text, such as a workflow's error, with every secret masked that this object stored or read."""
        for name, value in list(self._values.items()):  # other threads may add to it
            if name != "salt" and len(value) >= SHORT:
                text = text.replace(value, MASK)
        return text

    def holds_secret(self, value: Any) -> bool:
        """Return True if a JSON value holds a secret that this object stored or read."""
        if isinstance(value, Mapping):
            return any(self.holds_secret(part) for pair in value.items() for part in pair)
        if isinstance(value, list | tuple):
            return any(self.holds_secret(part) for part in value)
        return isinstance(value, str) and self.scrubbed(value) != value

    def _look_up(self, name: str) -> str:
        """Return a secret by its name, after reading the file again if the name is new. Raises DataError."""
        if name not in self._values:
            self._read()
        try:
            return self._values[name]
        except KeyError:
            raise DataError(
                f"the secret ${{secret:{name}}} of this task is not in {self._path}: put that file back, or submit the "
                "batch again"
            ) from None

    def _read(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                name, value = orjson.loads(line)
            except ValueError:
                continue  # cut off by a crash, before any task referred to it
            self._values[name] = value

    def _store(self, value: str) -> str:
        """Write a secret into the file unless it is there, and return the reference to it, `${secret:...}`."""
        try:
            make_private_folder(self._path.parent)
            handle = open_private(self._path, os.O_RDWR | os.O_APPEND)
            try:
                if (lock_holder := take_lock(handle, seconds=LOCK_SECONDS)) is not None:
                    raise DataError(f"the secret of a task can't be kept: {lock_holder} holds the lock of {self._path}")
                self._read()
                new_lines = []
                if "salt" not in self._values:  # without it a reader of the log could guess passwords by their names
                    new_lines.append(("salt", randomness.token_hex(16)))
                salt = self._values.setdefault("salt", new_lines[0][1] if new_lines else "")
                name = hmac.digest(salt.encode(), value.encode(), "sha256").hex()[:24]
                if self._values.get(name) != value:
                    new_lines.append((name, value))
                if new_lines:
                    os.write(handle, b"\n" + b"\n".join(map(orjson.dumps, new_lines)) + b"\n")
                    os.fsync(handle)
                    self._values.update(new_lines)
            finally:
                os.close(handle)
        except OSError as e:
            raise DataError(f"the secret of a task can't be kept in {self._path}: {e.strerror}") from e
        return f"${{secret:{name}}}"
