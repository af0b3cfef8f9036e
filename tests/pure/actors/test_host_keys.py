"""The keys between hosts: a file that may change while they are in use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from trinity_es.actors import system_key
from trinity_es.actors.system_key import HostKeys, read_key
from trinity_es.events.errors import WrongKey

OLD, NEW = "o" * 64, "n" * 64


@pytest.fixture(autouse=True)
def _read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_key, "READ_SECONDS", 0.0)
    monkeypatch.delenv("TRINITY_ES_KEY", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(f"{OLD}\n")
    return path


def test_the_file_is_read_again_and_holds_a_key_in_each_line(file: Path) -> None:
    keys = HostKeys(str(file))
    assert keys() == [OLD.encode()]
    file.write_text(f"{NEW}\n\n  {OLD}  \n")
    assert keys() == [NEW.encode(), OLD.encode()]
    file.write_text(NEW)
    assert keys() == [NEW.encode()]


def test_it_goes_before_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", NEW)
    assert HostKeys(str(file))() == [OLD.encode()]
    assert HostKeys("")() == [NEW.encode()]


@pytest.mark.parametrize("text", ["", "short", f"{NEW}\nshort"])
def test_while_the_file_is_no_good_the_keys_are_what_they_were(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = HostKeys(str(file))
    keys()
    file.write_text(text)
    assert keys() == keys() == [OLD.encode()]
    file.unlink()
    assert keys() == [OLD.encode()]
    assert caplog.text.count("32 or more are needed") == 1, "said once"
    assert "can't be read" in caplog.text
    assert NEW not in caplog.text
    file.touch(0o600)
    file.write_text(NEW)
    assert keys() == [NEW.encode()]


def test_zeros_that_a_power_loss_left_are_no_key(file: Path) -> None:
    keys = HostKeys(str(file))
    keys()
    file.write_bytes(bytes(100))
    assert keys() == [OLD.encode()]
    with pytest.raises(WrongKey, match=r"can't be printed.*openssl rand"):
        HostKeys(str(file))()


def test_nobody_waits_for_a_pipe_of_this_name(file: Path) -> None:
    keys = HostKeys(str(file))
    keys()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert keys() == [OLD.encode()]
    with pytest.raises(WrongKey, match="no regular file"):
        HostKeys(str(file))()


def test_a_file_that_was_never_good_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(WrongKey, match=r"hosts\.key_file, --key-file of `join`\), or the key itself in TRINITY_ES_KEY"):
        HostKeys(str(tmp_path / "nowhere"))()


def test_others_must_not_read_it(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(WrongKey, match="others can read the key file"):
        HostKeys(str(file))()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "group", "read"), [(0o440, 1000, True), (0o440, 1001, False), (0o444, 1000, False)])
def test_root_s_file_for_a_group_of_ours_is_read_as_kubernetes_mounts_it(
    mode: int, group: int, read: bool
) -> None:
    """A Secret is root's there, and `fsGroup` may read it."""
    asks = (
        "import os, sys; from trinity_es.actors.system_key import HostKeys; "
        "os.setgroups([1000]); os.setgid(1000); os.setuid(1000); print(HostKeys(sys.argv[1])())"
    )
    with tempfile.NamedTemporaryFile() as file:  # the folders of tests are closed to other users
        file.write(NEW.encode())
        file.flush()
        os.chown(file.name, 0, group)
        os.chmod(file.name, mode)
        done = subprocess.run([sys.executable, "-c", asks, file.name], cwd=ROOT, capture_output=True, text=True,
                              check=False)
    assert (NEW in done.stdout) is read, done.stderr


def test_a_system_has_one_key_for_as_long_as_it_runs(file: Path) -> None:
    file.write_text(f"{NEW}\n{OLD}\n")
    with pytest.raises(WrongKey, match=r"holds 2 keys.*name their file in hosts\.key_file"):
        read_key(str(file))
