"""The key that all processes of one system and its clients share: with it every frame between them is sealed.

It is the environment variable TRINITY_ES_KEY, or the content of a file that its owner alone can read. Forked processes
are told where by the environment, never by a command line.

The connection between hosts takes the keys of `hosts.key_file` where that is set. Those may change while it works.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import threading
import time

from trinity_es.events.errors import WrongKey

__all__ = ["FILE_VARIABLE", "KEY_VARIABLE", "HostKeys", "engine_token", "key_place", "make_key", "read_key"]

KEY_VARIABLE = "TRINITY_ES_KEY"
"""Environment variable with the key itself; goes before any file."""
FILE_VARIABLE = "TRINITY_ES_KEY_FILE"
"""Environment variable of a system's own processes: the file that their key is in."""
KEY_CHARACTERS = 32
"""A shorter key could be guessed."""
READ_SECONDS = 1.0
"""How long the keys between hosts are taken to be what they were when they were read."""
_log = logging.getLogger(__name__)


def make_key(path: str) -> None:
    """Make a key file that only this user can read, unless there is one or the key is in the environment."""
    if os.environ.get(KEY_VARIABLE):
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as e:
        raise WrongKey(f"the key file {path} can't be made ({e.strerror}): set system.key_file to another place") from e
    with os.fdopen(handle, "w") as f:
        f.write(secrets.token_hex(32) + "\n")


def key_place(path: str) -> str:
    """Return where `read_key` looks, in words."""
    return f"the environment variable {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else f"the file {path}"


def read_key(path: str | None = None) -> bytes:
    """Return the key, in a system's own process without a path.

    Raises WrongKey where there is none, or where somebody else could know it.
    """
    path = os.environ.get(FILE_VARIABLE, "") if path is None else path
    text = os.environ.get(KEY_VARIABLE) or _read(path, _OWN)
    found = _keys(text, key_place(path))
    if len(found) > 1:
        raise WrongKey(
            f"{key_place(path)} holds {len(found)} keys: a system has one for as long as it runs. Two, of which one is "
            "to be taken away, are for the connection between hosts: name their file in hosts.key_file"
        )
    return found[0]


class HostKeys:
    """The keys of the connection between hosts, the newest first: of `hosts.key_file`, a line for each.

    The file is read again when they are asked for. While it can't be read, or holds no key, they are what they were.
    Without a file it is the system's own key. May be called in any thread.
    """

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: list[bytes] = []
        self._read_at, self._said = float("-inf"), ""

    def __call__(self) -> list[bytes]:
        """Return the keys. Raises WrongKey where there never was one."""
        with self._lock:
            if time.monotonic() - self._read_at >= READ_SECONDS:
                self._read_again()
            return self._known

    def _read_again(self) -> None:
        try:
            found = _keys(_read(self._path, _SHARED), f"the file {self._path}") if self._path else [read_key()]
        except WrongKey as e:
            if not self._known:
                raise
            if self._said != e.message:
                _log.error("%s; the keys between hosts are what they were", e.message)
            self._said, self._read_at = e.message, time.monotonic()
            return
        if self._known and found != self._known:
            _log.info("the keys between hosts changed: there are %d now, where there were %d",
                      len(found), len(self._known))
        self._known, self._said, self._read_at = found, "", time.monotonic()


def _keys(text: str, place: str) -> list[bytes]:
    """Return the keys in this text, a line for each. Raises WrongKey."""
    found = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    for key in found:
        if len(key) < KEY_CHARACTERS:
            raise WrongKey(f"the key in {place} has {len(key)} characters: {KEY_CHARACTERS} or more are needed")
        if not key.isprintable():  # zeros that a power loss left of a file, say, which anybody could guess
            raise WrongKey(f"what is in {place} is no key: it has characters that can't be printed. "
                           "`openssl rand -hex 32` makes one")
    return [key.encode() for key in found]


_OWN = (
    "no key to the actor system: {path} can't be read ({why}), and " + KEY_VARIABLE + " is not set. It is made when "
    "the system is started; give that system's config (system.log_dir, system.key_file), or the key itself"
)
_SHARED = (
    "no key to the other hosts: {path} can't be read ({why}). All hosts share the head's: give a file with it "
    "(hosts.key_file, --key-file of `join`), or the key itself in " + KEY_VARIABLE
)


def _read(path: str, missing: str) -> str:
    """Return what stands in a file of keys. Raises WrongKey, which says `missing` where it can't be read."""
    try:
        # Not to wait for who never writes into a pipe of this name.
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise WrongKey(missing.format(path=path, why="it is no regular file"))
            text = f.read(4096).strip()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise WrongKey(missing.format(path=path, why=why)) from e
    if status.st_mode & 0o077 and not _is_mounted(status):
        raise WrongKey(f"others can read the key file {path}: `chmod 600 {path}`, then start the system anew")
    if status.st_uid not in (0, os.geteuid()):
        raise WrongKey(f"the key file {path} belongs to another user: set system.key_file to a file of your own")
    return text


def _is_mounted(status: os.stat_result) -> bool:
    """Return True for root's file that a group of ours may read, as Kubernetes mounts a Secret for who is not root."""
    groups = {os.getegid(), *os.getgroups()}
    return os.geteuid() != 0 and status.st_uid == 0 and status.st_gid in groups and not status.st_mode & 0o037


def engine_token(key: bytes) -> str:
    """Return the token of the engines' HTTP endpoints: who has it may ask them, and learns nothing of the key."""
    return hmac.digest(key, b"trinity-es engine token", "sha256").hex()
