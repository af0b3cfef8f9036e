"""The store of journals, the same beside a SQLite log and in PostgreSQL."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.journal import KeptAnswer, chunk, kept_runs
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.journal_store import Journals, open_journals

ONE, TWO = ("runner-0", 1), ("host/runner-0 b", 12)


@pytest.fixture
def store(store_url: str) -> Iterator[Journals]:
    store = open_journals(store_url)
    yield store
    store.close()


def test_each_life_has_its_segments_in_order(store: Journals, store_url: str) -> None:
    assert store.lives() == []
    store.append(ONE, 0, b"a", durable=False)
    store.append(TWO, 0, b"z", durable=True)
    store.append(ONE, 0, b"b", durable=True)
    store.append(ONE, 1, b"c", durable=False)
    other = open_journals(store_url)
    assert b"".join(other.read(ONE)) == b"abc"
    assert sorted(other.lives()) == sorted([ONE, TWO])
    other.drop(ONE, 0)
    other.drop(ONE, 7)
    assert b"".join(other.read(ONE)) == b"c"
    other.drop(TWO)
    assert (other.lives(), other.read(TWO)) == ([ONE], [])
    other.close()


WRITER = """
import os, sys
from trinity_es.events.store.journal_store import open_journals
store = open_journals(sys.argv[1])
for i in range(50):
    store.append(("r", 1), 0, b"record %d;" % i, durable=False)
os.kill(os.getpid(), 9)
"""


def test_what_was_appended_outlives_its_process(store: Journals, store_url: str) -> None:
    writer = subprocess.run([sys.executable, "-c", WRITER, store_url], cwd=ROOT, check=False)
    assert writer.returncode == -signal.SIGKILL
    assert b"".join(store.read(("r", 1))) == b"".join(b"record %d;" % i for i in range(50))


def test_files_are_for_this_user_alone_and_a_full_disk_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.sqlite"
    store = open_journals(url)
    record = chunk((1, "s", 0, 0), 1.0, "c", 0, 0, 0, KeptAnswer(tokens=[1, 2], spans=[[0, 0, 2]]))
    store.append(ONE, 0, record, durable=True)
    [file] = Path(f"{parse_url(url).database}.journals").glob("*/*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(record) + 5, before[1]))
    try:
        with pytest.raises(LogUnavailable, match=r"of a journal can't be written in .*journals"):
            store.append(ONE, 0, record, durable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    [part] = store.read(ONE)
    assert len(part) == len(record) + 5, "its tail is torn"
    assert kept_runs([part])[0].calls["c", 0][0].tokens == [1, 2]
    os.unlink(file)
    store.close()


def test_a_sync_takes_earlier_segments_too_and_closes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced = open_journals(f"sqlite:///{tmp_path}/log.sqlite"), list[str]()
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    store.append(ONE, 0, b"a", durable=False)
    store.append(ONE, 1, b"b", durable=False)
    store.append(ONE, 1, b"", durable=True)
    store.append(ONE, 1, b"c", durable=True)
    assert synced == ["00000000", "00000001", "00000001"]
    assert store.read(ONE) == [b"a", b"bc"]
    store.close()
