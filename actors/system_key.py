"""The key that all processes of one system and its clients share: with it every frame between them is sealed.

It is the environment variable TRINITY_ES_KEY, or the content of a file that its owner alone can read. Forked processes
are told where by the environment, never by a command line.

Hosts show the head the key of `hosts.key_file` where that is set. It may change while they work.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat

from trinity_es.events.errors import WrongKey

__all__ = ["FILE_VARIABLE", "KEY_VARIABLE", "engine_token", "host_key", "key_place", "make_key", "read_key"]

KEY_VARIABLE = "TRINITY_ES_KEY"
"""Environment variable with the key itself; goes before any file."""
FILE_VARIABLE = "TRINITY_ES_KEY_FILE"
"""Environment variable of a system's own processes: the file that their key is in."""
KEY_CHARACTERS = 32
"""A shorter key could be guessed."""


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
    return _checked(os.environ.get(KEY_VARIABLE) or _read(path, _OWN), key_place(path))


def host_key(path: str) -> bytes:
    """Return the key that head and hosts share: of `hosts.key_file`, without one the system's own. Raises WrongKey."""
    return _checked(_read(path, _SHARED), f"the file {path}") if path else read_key()


def _checked(text: str, place: str) -> bytes:
    """Return the key that this text is. Raises WrongKey."""
    key = text.strip()
    if len(key) < KEY_CHARACTERS:
        raise WrongKey(f"the key in {place} has {len(key)} characters: {KEY_CHARACTERS} or more are needed")
    if not key.isprintable():  # two lines, or zeros that a power loss left of a file, which anybody could guess
        raise WrongKey(f"what is in {place} is no key: it has characters that can't be printed. "
                       "`openssl rand -hex 32` makes one")
    return key.encode()


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
