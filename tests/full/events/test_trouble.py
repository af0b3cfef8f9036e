"""Wrong files, full disks, lost connections, held locks: each is told as what it is, and nothing is half-written."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.helpers.faults import Server, Wire, die_after_commit, rewind
from tests.helpers.logs import dropped, write
from tests.helpers.paths import ROOT
from tests.helpers.projectors import Counts, counts
from trinity_es.events.errors import ConfigError, Fenced, LogCorrupt, LogNotFound, LogRewound, LogUnavailable, NotALog
from trinity_es.events.store.database.urls import masked, parse_url
from trinity_es.events.store.log import EventLog, Write

Open = Callable[..., EventLog]


def place_of(kind: str, folder: Path) -> Path:
    path = folder / "log.db"
    if kind == "another program's":
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("CREATE TABLE recipes (name TEXT)")
    elif kind != "nothing":
        path.write_text("a diary, not a database\n" * 200 if kind == "a text" else "")
    return folder if kind == "a folder" else path


class TestWrongFiles:
    @pytest.mark.parametrize(("kind", "how", "error", "told"), [
        ("nothing", {}, LogNotFound, r"no log at .*log\.db"), ("nothing", {"read_only": True}, LogNotFound, "no log"),
        ("a folder", {"create": True}, NotALog, "directory"), ("empty", {}, NotALog, "empty file"),
        ("a text", {}, NotALog, "not a database"), ("a text", {"create": True}, NotALog, "not a database"),
        ("another program's", {}, NotALog, "recipes"), ("another program's", {"create": True}, NotALog, "recipes"),
    ])
    def test_what_is_there_is_told_and_left_as_it_is(
        self, tmp_path: Path, kind: str, how: dict[str, bool], error: type[Exception], told: str
    ) -> None:
        place = place_of(kind, tmp_path)
        before = {p: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(error, match=told):
            EventLog.open(str(place), **how)  # type: ignore[arg-type]  # one of its flags
        assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before

    def test_a_log_cut_short(self, tmp_path: Path) -> None:
        path = tmp_path / "log.db"
        with EventLog.open(str(path), create=True) as log:
            for i in range(50):
                write(log, "a", i, size=2000)
        path.write_bytes(path.read_bytes()[: 4096 * 9])
        with pytest.raises(LogCorrupt, match=r"damaged|missing"), EventLog.open(str(path)) as log:
            list(log.read())

    def test_a_folder_that_is_not_there_is_made_when_the_log_is(self, tmp_path: Path) -> None:
        EventLog.open(f"sqlite:///{tmp_path}/a/b/log.db", create=True).close()
        assert (tmp_path / "a/b/log.db").exists()

    @pytest.mark.parametrize("url", ["", ":memory:", "sqlite://", "mysql://u:secret@h/d", "http//x"])
    def test_what_is_no_place_for_a_log(self, url: str) -> None:
        if url == "http//x":
            with pytest.raises(LogNotFound):
                EventLog.open(url)
        else:
            with pytest.raises(ConfigError) as caught:
                EventLog.open(url)
            assert "secret" not in str(caught.value)

    def test_an_unknown_durability(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="'power'"):
            EventLog.open(str(tmp_path / "log.db"), create=True, durability="forever")  # type: ignore[arg-type]  # the point of the test


class TestUrls:
    @pytest.mark.parametrize(("written", "shown"), [
        ("run/log.db", "sqlite:///run/log.db"),
        ("sqlite:///run/log.db", "sqlite:///run/log.db"),
        ("sqlite:////abs/log.db", "sqlite:////abs/log.db"),
        ("postgresql://me:s3cret@db:5432/rl", "postgresql+psycopg://me:***@db:5432/rl"),
        ("postgres://me:s3cret@db/rl", "postgresql+psycopg://me:***@db/rl"),
        ("postgresql+psycopg://me@db/rl?password=s3cret", "postgresql+psycopg://me@db/rl?password=***"),
    ])
    def test_are_understood_as_people_write_them_and_shown_without_the_password(self, written: str, shown: str) -> None:
        assert masked(parse_url(written)) == masked(written) == shown

    def test_a_password_is_in_no_message(self) -> None:
        with pytest.raises(LogUnavailable) as caught:
            EventLog.open("postgresql://me:s3cret-word@127.0.0.1:9/rl?application_name=trinity", patience=0.1)
        told = f"{caught.value} {caught.value!r} {caught.value.details}"
        assert "s3cret-word" not in told
        assert "127.0.0.1" in told


class TestFullDisk:
    @pytest.mark.parametrize("limit", [150_000, 151_000, 180_000, 300_001])
    def test_a_disk_that_fills_up_loses_nothing_that_was_acknowledged(self, tmp_path: Path, limit: int) -> None:
        """A child may write files of `limit` bytes; at the limit a write is cut short, as on a full disk."""
        code = (
            "import resource, sys\n"
            "from trinity_es.events.errors import LogUnavailable\n"
            "from trinity_es.events.store.log import EventLog, Write\n"
            "from trinity_es.events.vocabulary import TaskDropped\n"
            "log = EventLog.open(sys.argv[1], create=True, patience=2)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
            "done = 0\n"
            "def write():\n"
            "    event = TaskDropped(tasks=[done], reason='x' * 500)\n"
            "    log.append([Write(stream='a', expected_version=done, events=[event])], commit_id=f'c{done}')\n"
            "try:\n"
            "    while done < 1000:\n"
            "        write(); done += 1\n"
            "except LogUnavailable as e:\n"
            "    assert 'nothing was acknowledged' in str(e), e\n"
            "    try:\n"
            "        write(); sys.exit('written to a full disk')\n"
            "    except LogUnavailable: pass\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
            "    write(); print(done + 1); sys.exit(0)\n"
            "sys.exit('the limit was never met')\n"
        )
        child = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "log.db"), str(limit)],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )
        assert child.returncode == 0, child.stderr
        with EventLog.open(str(tmp_path / "log.db")) as log:
            assert [r.commit_id for r in log.read()] == [f"c{i}" for i in range(int(child.stdout))]
            assert log.verify() == []


class TestOtherWriters:
    def test_a_writer_outside_our_lock_makes_us_wait_not_fail(self, tmp_path: Path) -> None:
        path = tmp_path / "log.db"
        with EventLog.open(str(path), create=True) as log:
            code = (
                "import sqlite3, sys\n"
                "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
                "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.readline(); c.execute('ROLLBACK')\n"
            )
            shell = subprocess.Popen(
                [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            with shell:
                assert shell.stdout
                assert shell.stdin
                assert shell.stdout.readline() == "held\n"
                let_go = threading.Timer(0.3, lambda: (shell.stdin.write("\n"), shell.stdin.flush()))  # type: ignore[union-attr]  # asserted above
                let_go.start()
                write(log, "a", 0)
                let_go.join()
            assert log.head().position == 1

    def test_a_log_is_not_used_by_a_forked_child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with EventLog.open(str(tmp_path / "log.db"), create=True) as log:
            pid = os.getpid()
            monkeypatch.setattr("trinity_es.events.store.database.database.os.getpid", lambda: pid + 1)
            with pytest.raises(LogUnavailable, match=f"process {pid}"):
                write(log, "a", 0)
            monkeypatch.undo()


class TestReadersOfSqlite:
    def test_see_what_a_killed_writer_had_committed(self, tmp_path: Path) -> None:
        path = tmp_path / "log.db"
        code = (
            "import os, signal, sys\n"
            "from trinity_es.events.store.log import EventLog, Write\n"
            "from trinity_es.events.vocabulary import BatchTrained\n"
            "log = EventLog.open(sys.argv[1], create=True, durability='process')\n"
            "log.append([Write(stream='a', expected_version=0, events=[BatchTrained(step=1)])], commit_id='c')\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        child = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=60, check=False)
        assert child.returncode == -signal.SIGKILL
        with EventLog.open(str(path), read_only=True) as reader:
            assert [r.commit_id for r in reader.read()] == ["c"]
            assert reader.verify() == []

    def test_see_a_log_in_a_folder_that_can_not_be_written(self) -> None:
        """As another user, who can only read: the write-ahead log's files can't be made there."""
        folder = Path(tempfile.mkdtemp(prefix="es-shared-"))  # pytest's own folder is closed to other users
        with EventLog.open(str(folder / "log.db"), create=True) as log:
            write(log, "a", 0)
        (folder / "log.db.lock").unlink()
        code = (
            "import os, sys\n"
            "sys.path.insert(0, sys.argv[2])\n"
            "import trinity_es.events.store.log, trinity_es.events.store.checks.verify\n"
            "from trinity_es.events.vocabulary import BatchTrained\n"
            "trinity_es.events.codec.check(BatchTrained(step=1))  # loads what this user can read and nobody can not\n"
            "os.chdir('/')\n"
            "if os.getuid() == 0:\n"
            "    os.setgid(65534); os.setuid(65534)\n"
            "log = trinity_es.events.store.log.EventLog.open(sys.argv[1], read_only=True)\n"
            "assert len(list(log.read())) == 1 and log.verify() == []\n"
        )
        folder.chmod(0o555)
        (folder / "log.db").chmod(0o444)
        try:
            child = subprocess.run(
                [sys.executable, "-c", code, str(folder / "log.db"), str(ROOT)],
                cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
            )
            left = sorted(p.name for p in folder.iterdir())
        finally:
            folder.chmod(0o755)
            shutil.rmtree(folder)
        assert child.returncode == 0, child.stderr
        assert left == ["log.db"]

    def test_the_write_ahead_log_does_not_grow_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trinity_es.events.store.database.database.CHECKPOINT_BYTES", 200_000)
        with EventLog.open(str(tmp_path / "log.db"), create=True, durability="process") as log:
            for i in range(300):
                write(log, "a", i, size=4000)
            assert (tmp_path / "log.db-wal").stat().st_size < 1_500_000
            assert (tmp_path / "log.db").stat().st_size > 1_000_000

    def test_the_write_ahead_log_is_small_again_after_a_reader_from_outside_has_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("trinity_es.events.store.database.database.CHECKPOINT_BYTES", 200_000)
        monkeypatch.setattr("trinity_es.events.store.database.database.MOST_WAL_BYTES", 800_000, raising=False)
        monkeypatch.setattr("trinity_es.events.store.database.database.TRUNCATION_SECONDS", 0.0)
        path, wal = tmp_path / "log.db", tmp_path / "log.db-wal"
        with EventLog.open(str(path), create=True, durability="process") as log:
            write(log, "a", 0)
            reader = sqlite3.connect(path, isolation_level=None)
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM es_event").fetchone() == (1,)
            for i in range(1, 300):
                write(log, "a", i, size=4000)
            assert wal.stat().st_size > 2_000_000, "it is needed by the reader"
            reader.close()
            write(log, "a", 300)
            assert wal.stat().st_size < 800_000
            write(log, "a", 301)
            assert log.verify() == []


class TestAnAnswerThatIsLost:
    def test_a_lease_that_was_lost_meanwhile_does_not_hide_what_was_done(self, open_log: Open) -> None:
        log = open_log()
        lease = log.acquire_lease("coordinator", {"pid": 1})
        die_after_commit(log, 1)
        event = [Write(stream="a", expected_version=0, events=[dropped(1)])]
        with pytest.raises(LogUnavailable):
            log.append(event, commit_id="once", lease=lease, patience=0.0)
        open_log().acquire_lease("coordinator", {"pid": 2})
        assert log.append(event, commit_id="once", lease=lease).duplicate
        with pytest.raises(Fenced):
            log.append([Write(stream="a", expected_version=1, events=[dropped(2)])], commit_id="new", lease=lease)

    @pytest.mark.postgres
    def test_a_connection_that_is_cut_between_commit_and_answer(self, own_server: Server) -> None:
        """On the wire: the server commits, its answer never arrives. Of every two commits, reads and retries too."""
        wire, database = Wire(own_server.socket), own_server.new_database()
        with EventLog.open(wire.url(database), create=True, projectors=[Counts()]) as log:
            wire.every = 2
            duplicates = 0
            for i in range(20):
                event = Write(stream="a", expected_version=i, events=[dropped(i)])
                duplicates += log.append([event], commit_id=f"c{i}").duplicate
            assert duplicates > 5
            assert wire.swallowed > 5
            wire.every = 0
            assert [r.commit_id for r in log.read()] == [f"c{i}" for i in range(20)]
            assert counts(log) == {"a": 20}
            assert log.verify() == []
        wire.cut()


class TestALogThatLostWhatItHad:
    """Restored from a copy under a writer's feet; on PostgreSQL also a standby that was behind."""

    def test_also_where_others_have_written_since(self, open_log: Open) -> None:
        log, other = open_log(), open_log()
        for i in range(4):
            write(log, "a", i)
        rewind(open_log(), 2)
        for i in range(2, 6):
            write(other, "a", i, commit=f"other-{i}")
        with pytest.raises(LogRewound):
            write(log, "a", 6)


@pytest.mark.parametrize(("durability", "setting"), [("process", 1), ("power", 2)])
def test_durability_on_sqlite_is_whether_a_commit_is_synced(tmp_path: Path, durability: Any, setting: int) -> None:
    url = str(tmp_path / "log.db")  # its pool has one connection: the one that it writes with
    with EventLog.open(url, create=True, durability=durability) as log, log.engine.connect() as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == setting
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
