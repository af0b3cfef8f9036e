"""A log file that is renamed, replaced, deleted or cut while it is in use: nothing is acknowledged into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.logs import write
from tests.helpers.paths import ROOT
from trinity_es.config.config import Config
from trinity_es.events.errors import LogCorrupt, LogReplaced, LogUnavailable
from trinity_es.events.store.database.urls import file_url
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.system import running_system
from trinity_es.testing import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "log.db"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    with EventLog.open(str(path), create=True) as opened:
        write(opened, "a", 0)
        yield opened


def renamed(path: Path) -> Callable[[], None]:
    aside = path.with_name("aside.db")
    path.rename(aside)
    return lambda: aside.rename(path)


def renamed_over(path: Path) -> Callable[[], None]:
    kept, copy = path.with_name("kept.db"), path.with_name("copy.db")
    os.link(path, kept)
    shutil.copy(path, copy)
    copy.replace(path)
    return lambda: kept.replace(path)


def deleted(path: Path) -> Callable[[], None]:
    kept = path.with_name("kept.db")
    os.link(path, kept)
    path.unlink()
    return lambda: kept.rename(path)


def folder_renamed(path: Path) -> Callable[[], None]:
    aside = path.parent.with_name("aside")
    path.parent.rename(aside)
    return lambda: aside.rename(path.parent) and None


def another_log_there(path: Path) -> Callable[[], None]:
    back = folder_renamed(path)
    path.parent.mkdir()
    with EventLog.open(str(path), create=True) as other:
        write(other, "a", 0)

    def put_back() -> None:
        shutil.rmtree(path.parent)
        back()

    return put_back


@pytest.mark.parametrize("away", [renamed, renamed_over, deleted, folder_renamed, another_log_there])
def test_a_file_without_its_name_takes_nothing_and_goes_on_when_it_has_it_again(
    log: EventLog, path: Path, away: Callable[[Path], Callable[[], None]]
) -> None:
    put_back = away(path)
    for _ in range(2):
        with pytest.raises(LogReplaced, match=r"Nothing was acknowledged since: put (that|the earlier) file"):
            write(log, "a", 1)
        with pytest.raises(LogReplaced):
            log.require_place()
    assert log.stream_version("a") == 1, "what is open is still read"
    put_back()
    write(log, "a", 1)
    assert log.verify() == []
    with EventLog.open(str(path)) as again:
        assert again.head().position == 2


def test_a_link_that_is_switched_to_another_log_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with EventLog.open(str(tmp_path / name / "log.db"), create=True) as made:
            write(made, "a", 0)
    link = tmp_path / "log.db"
    link.symlink_to(tmp_path / "one/log.db")
    with EventLog.open(str(link)) as log:
        write(log, "a", 1)
        link.unlink()
        link.symlink_to(tmp_path / "two/log.db")
        with pytest.raises(LogReplaced, match="a link was switched"):
            write(log, "a", 2)
    with EventLog.open(str(tmp_path / "two/log.db")) as other:
        assert other.head().position == 1


def test_a_link_to_a_log_has_the_locks_and_the_payloads_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    file, link = tmp_path / "disk/log.db", tmp_path / "log.db"
    link.symlink_to(file)
    names = [str(link), str(file)]
    system = {"log_dir": str(tmp_path)}
    configs = [Config.from_dict({"store": {"url": file_url(name)}, "system": system}) for name in names]
    assert len({running_system.lock_file(config, "trainer") for config in configs}) == 1
    with EventLog.open(names[0], create=True) as log:
        write(log, "a", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "log.db"}
    [digest] = {open_payloads(name).put(b"one") for name in names}
    assert [open_payloads(name, create=False).get(digest) for name in names] == [b"one"] * 2


def test_two_servers_behind_sockets_have_one_system_each(tmp_path: Path) -> None:
    urls = [f"postgresql:///run?host={tmp_path / name}" for name in ("one", "two")]
    assert len({running_system.output_file(Config.from_dict({"store": {"url": url}})) for url in urls}) == 2


def test_a_file_that_is_moved_in_the_middle_of_a_commit_is_not_acknowledged(
    log: EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look before the commit and the commit: then it is in the file, and found by who tries again."""
    from sqlalchemy.engine import RootTransaction

    commit, back = RootTransaction._do_commit, list[Callable[[], None]]()  # type: ignore[attr-defined]  # the moment is there

    def move_and_commit(self: RootTransaction) -> None:
        if not back:
            back.append(renamed(path))
        commit(self)

    monkeypatch.setattr(RootTransaction, "_do_commit", move_and_commit)
    with pytest.raises(LogReplaced):
        write(log, "a", 1, commit="once")
    back[0]()
    write(log, "a", 1, commit="once")
    assert log.head().position == 2


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_write_ahead_log_that_lost_its_name_is_saved_whole(log: EventLog, path: Path, suffix: str, how: str) -> None:
    for i in range(1, 20):
        write(log, "a", i)
    beside = Path(f"{path}{suffix}")
    beside.unlink()
    if how == "replaced":
        beside.touch()
    write(log, "a", 20)
    code = "import sys; from trinity_es.events.store import log; print(log.EventLog.open(sys.argv[1]).head().position)"
    there = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(there, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "21\n"
    assert log.verify() == []


def test_a_write_ahead_log_that_lost_its_name_is_saved_without_a_write(log: EventLog, path: Path) -> None:
    write(log, "a", 1)
    Path(f"{path}-wal").unlink()
    log.require_place()
    with EventLog.open(str(path), read_only=True) as reader:
        assert reader.head().position == 2


def test_a_file_that_is_cut_is_told_and_takes_nothing(log: EventLog, path: Path) -> None:
    log.close()
    with EventLog.open(str(path)) as again:
        write(again, "a", 1)
        os.truncate(path, 4096)
        with pytest.raises(LogCorrupt, match=r"was cut from \d+ to 4096 bytes"):
            write(again, "a", 2)


def test_a_write_ahead_log_that_is_cut_is_told_and_takes_nothing(log: EventLog, path: Path) -> None:
    wal = Path(f"{path}-wal")
    os.truncate(wal, wal.stat().st_size - 5000)
    with pytest.raises(LogCorrupt, match="events that were acknowledged are gone"):
        write(log, "a", 1)


def test_who_makes_the_write_ahead_log_or_the_file_smaller_in_order_disturbs_nobody(log: EventLog, path: Path) -> None:
    import sqlite3

    for i in range(1, 30):
        write(log, "a", i, size=5000)
    shell = sqlite3.connect(path)
    shell.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    write(log, "a", 30)
    shell.execute("VACUUM")
    shell.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shell.close()
    write(log, "a", 31)
    assert log.verify() == []


def test_a_deleted_log_is_not_made_again_empty_by_who_had_it_open(log: EventLog, path: Path) -> None:
    path.unlink()
    with pytest.raises(LogReplaced):
        write(log, "a", 1)
    log._db.engine.dispose()
    with pytest.raises(LogReplaced):
        write(log, "a", 1)
    assert not path.exists()


@pytest.mark.parametrize("away", [renamed_over, deleted, folder_renamed])
def test_a_reader_goes_on_with_the_file(log: EventLog, path: Path, away: Callable[[Path], Callable[[], None]]) -> None:
    with EventLog.open(str(path), read_only=True) as reader:
        assert reader.head().position == 1
        put_back = away(path)
        with pytest.raises(LogReplaced):
            reader.head()
        put_back()
        write(log, "a", 1)
        wait_until(lambda: reader.head().position == 2, "the reader to see what was written")


def test_a_payload_folder_that_was_deleted_is_not_begun_again(path: Path) -> None:
    store = open_payloads(str(path))
    shutil.rmtree(path.parent)
    with pytest.raises(LogUnavailable, match="is gone: it was renamed or deleted"):
        store.put(b"tokens")
    assert not path.parent.exists()
