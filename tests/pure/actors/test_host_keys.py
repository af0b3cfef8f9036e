"""The key between hosts: a file that may change while hosts are connected."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from trinity_es.actors.system_key import read_host_key, read_key
from trinity_es.events.errors import WrongKey

OLD, NEW = "o" * 64, "n" * 64


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_ES_KEY", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(f"{OLD}\n")
    return path


def test_the_file_is_read_each_time_and_before_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", NEW)
    assert (read_host_key(str(file)), read_host_key("")) == (OLD.encode(), NEW.encode())
    file.write_text(f"  {NEW}\n\n")
    assert read_host_key(str(file)) == NEW.encode()


@pytest.mark.parametrize(("content", "wrong"), [
    ("", "32 or more are needed"), ("short", "32 or more are needed"), (f"{NEW}\n{OLD}", r"can't be printed.*openssl"),
    ("\0" * 100, r"can't be printed.*openssl"),  # as a power loss leaves it
])
def test_what_is_no_key_is_refused(file: Path, content: str, wrong: str) -> None:
    file.write_text(content)
    with pytest.raises(WrongKey, match=wrong) as told:
        read_host_key(str(file))
    assert NEW not in str(told.value)
    with pytest.raises(WrongKey, match=wrong):
        read_key(str(file))


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(("spoil", "wrong"), [
    (make_pipe, "no regular file"), (lambda file: file.chmod(0o640), "others can read the key file"),
    (Path.unlink, r"hosts\.key_file, --key-file of `join`\), or set TRINITY_ES_KEY to the key"),
], ids=["a pipe, which nobody waits for", "others can read it", "missing"])
def test_a_file_that_is_not_ours_alone_is_refused(file: Path, spoil: Callable[[Path], None], wrong: str) -> None:
    spoil(file)
    with pytest.raises(WrongKey, match=wrong):
        read_host_key(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "group", "read"), [(0o440, 1000, True), (0o440, 1001, False), (0o444, 1000, False)])
def test_root_s_file_for_a_group_of_ours_is_read_as_kubernetes_mounts_it(mode: int, group: int, read: bool) -> None:
    """A Secret is root's there, and `fsGroup` may read it."""
    asks = (
        "import os, sys; from trinity_es.actors.system_key import read_host_key; "
        "os.setgroups([1000]); os.setgid(1000); os.setuid(1000); print(read_host_key(sys.argv[1]))"
    )
    with tempfile.NamedTemporaryFile() as file:  # the folders of tests are closed to other users
        file.write(NEW.encode())
        file.flush()
        os.chown(file.name, 0, group)
        os.chmod(file.name, mode)
        done = subprocess.run([sys.executable, "-c", asks, file.name], cwd=ROOT, capture_output=True, text=True,
                              check=False)
    assert (NEW in done.stdout) is read, done.stderr
