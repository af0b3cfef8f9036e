"""The key that all processes of one system and its clients share; it seals every frame between them.

It is the environment variable TRINITY_ES_KEY, or the content of a file that only its owner can read. Child processes
get the path of that file from the environment, never from a command line.

If `hosts.key_file` is set, the hosts of a system share the key in it. It may change while they run.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat

from trinity_es.events.errors import WrongKey

__all__ = ["FILE_VARIABLE", "KEY_VARIABLE", "engine_token", "key_source", "make_key", "read_host_key", "read_key"]

KEY_VARIABLE = "TRINITY_ES_KEY"
"""Environment variable with the key itself. If it is set, no file is read."""
FILE_VARIABLE = "TRINITY_ES_KEY_FILE"
"""Environment variable, set for a system's own processes, with the path of the key file."""
KEY_CHARACTERS = 32
"""Minimum length of a key. A shorter key could be guessed."""


def make_key(path: str) -> None:
    """Create a key file that only this user can read, unless it exists or the key is in the environment."""
    if os.environ.get(KEY_VARIABLE):
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as e:
        raise WrongKey(f"the key file {path} can't be made ({e.strerror}): set system.key_file to another path") from e
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def key_source(path: str) -> str:
    """Return where `read_key(path)` takes the key from, for errors: the environment variable, or the file."""
    return f"the environment variable {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else f"the file {path}"


def read_key(path: str | None = None) -> bytes:
    """Return the system's key, from the environment or the file `path` (a system's own process passes no path). Raises
    WrongKey if there is no key, or if another user could have read it."""
    path = os.environ.get(FILE_VARIABLE, "") if path is None else path
    return _parse_key(os.environ.get(KEY_VARIABLE) or _read_key_file(path, _NO_SYSTEM_KEY), key_source(path))


def read_host_key(path: str) -> bytes:
    """Return the key that hosts share, from the file `path` (`hosts.key_file`). Without a path, it is the system's key.
    Raises WrongKey."""
    return _parse_key(_read_key_file(path, _NO_HOST_KEY), f"the file {path}") if path else read_key()


def _parse_key(text: str, place: str) -> bytes:
    """Return the key in a text from `place`. Raises WrongKey if it is too short or has control characters."""
    key = text.strip()
    if len(key) < KEY_CHARACTERS:
        raise WrongKey(f"the key in {place} has {len(key)} characters, and {KEY_CHARACTERS} or more are needed: "
                       "make one with `openssl rand -hex 32`")
    if not key.isprintable():  # two lines, or the zeros that a power loss left in a file, which could be guessed
        raise WrongKey(f"the key in {place} has characters that can't be printed: make one with "
                       "`openssl rand -hex 32`")
    return key.encode()


_NO_SYSTEM_KEY = (
    "no key to the actor system: {path} can't be read ({why}), and " + KEY_VARIABLE + " is not set. The system makes "
    "that file when it starts: use the config of the system (system.log_dir, system.key_file), or set the variable"
)
_NO_HOST_KEY = (
    "no key to the other hosts: {path} can't be read ({why}). All hosts need the head's key: name a file with it "
    "(hosts.key_file, --key-file of `join`), or set " + KEY_VARIABLE + " to the key"
)


def _read_key_file(path: str, missing: str) -> str:
    """Return the content of a key file. Raises WrongKey, with the text `missing` if it can't be read."""
    try:
        # Non-blocking: opening a pipe of this name would wait for a writer.
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise WrongKey(missing.format(path=path, why="it is no regular file"))
            text = f.read(4096).strip()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise WrongKey(missing.format(path=path, why=why)) from e
    if status.st_mode & 0o077 and not _is_mounted(status):
        raise WrongKey(f"others can read the key file {path}: `chmod 600 {path}`, then start the system again")
    if status.st_uid not in (0, os.geteuid()):
        raise WrongKey(f"the key file {path} belongs to another user: set system.key_file to a file of your own")
    return text


def _is_mounted(status: os.stat_result) -> bool:
    """Return True if root owns the file and one of our groups may read it, as when Kubernetes mounts a Secret."""
    groups = {os.getegid(), *os.getgroups()}
    return os.geteuid() != 0 and status.st_uid == 0 and status.st_gid in groups and not status.st_mode & 0o037


def engine_token(key: bytes) -> str:
    """Return the token for the engines' HTTP endpoints. It is a hash of the key, so it does not reveal the key."""
    return hmac.digest(key, b"trinity-es engine token", "sha256").hex()
