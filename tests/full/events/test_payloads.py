"""What a payload store promises, the same beside a SQLite log, in PostgreSQL, in S3 and in a shared folder."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import create_engine, text

from tests.helpers.any_experience import small
from tests.helpers.fixtures.stores import BACKENDS
from tests.helpers.paths import ROOT
from tests.helpers.s3_server import BUCKET
from trinity_es.actors.config.run_sections import StoreConfig
from trinity_es.actors.runner.unit_reports import Reporter
from trinity_es.events.errors import CorruptPayload, LogNotFound, LogUnavailable, PayloadNotFound
from trinity_es.events.experience import EID, Experience
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.experiences import read_columns, read_experiences, write_delivered
from trinity_es.events.store.payloads.payload_place import folder_of, recorded_place
from trinity_es.events.store.payloads.payloads import PayloadStore, digest_of, open_payloads, patient, settle_place
from trinity_es.events.vocabulary import PayloadRef

PLACES = ["s3", "folder"]
"""Places other than the first release's, of which the log has to record the URL."""


@pytest.fixture(params=[*BACKENDS, *PLACES])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a log with each kind of store in turn, which is empty."""
    url = f"sqlite:///{tmp_path / 'log.db'}"
    if request.param not in PLACES:
        return request.getfixturevalue("postgres")() if request.param == "postgresql" else url
    place = f"file://{tmp_path}/shared"
    if request.param == "s3":
        request.getfixturevalue("s3")
        place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    else:
        (tmp_path / "shared").mkdir()
    EventLog.open(url, create=True, durability="process").close()
    settle_place(url, place)
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[PayloadStore]:
    store = open_payloads(store_url)
    yield store
    store.close()


def test_a_process_that_knows_the_place_opens_no_sqlite_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    for name, wanted in {"moved.db": f"file://{tmp_path}/shared", "beside.db": ""}.items():
        url = f"sqlite:///{tmp_path / name}"
        EventLog.open(url, create=True, durability="process").close()
        place = settle_place(url, wanted)
        assert settle_place(url, wanted) == place == recorded_place(url, patience=1.0)
        digest = open_payloads(url).put(b"tokens")
        reporter = Reporter(StoreConfig(url=url), lambda outcomes: None, logging.getLogger(), place)
        with monkeypatch.context() as patch:
            patch.setattr(Database, "__init__", lambda *_, **__: pytest.fail("the log was opened"))
            reporter.open()
        assert reporter.payloads.get(digest) == b"tokens"


@pytest.mark.parametrize("data", [b"", b"\0\xff" * 10, b"x" * 3_000_000])
def test_bytes_come_back_as_they_were_put(store: PayloadStore, data: bytes) -> None:
    digest = store.put(data)
    assert digest == hashlib.sha256(data).hexdigest() == digest_of(data)
    assert store.get(digest) == data
    assert store.size(digest) == len(data)


@pytest.mark.parametrize("digest", ["0" * 64, "../../etc/passwd", "", "ABC", "0" * 63 + "\n"])
def test_what_is_not_there_is_told(store: PayloadStore, digest: str) -> None:
    with contextlib.suppress(PayloadNotFound):
        assert store.size(digest) is None
    with pytest.raises(PayloadNotFound) as caught:
        store.get(digest)
    assert isinstance(caught.value, KeyError)


def test_deleting_takes_it_away_and_can_be_repeated(store: PayloadStore) -> None:
    digest, other = store.put(b"one"), store.put(b"two")
    store.delete(digest)
    store.delete(digest)
    assert store.size(digest) is None
    assert list(store.digests()) == [other]
    assert store.put(b"one") == digest
    assert store.size(digest) == 3


def test_a_payload_s_size_is_told_without_reading_it(store: PayloadStore) -> None:
    digest = store.put(b"four")
    assert store.size(digest) == 4
    assert patient(store, 1.0).size(digest) == 4
    assert store.size(store.put(b"")) == 0
    store.delete(digest)
    assert store.size(digest) is None


def test_digests_are_in_order(store: PayloadStore) -> None:
    put = [store.put(bytes([i])) for i in range(40)]
    assert list(store.digests()) == sorted(put)


def test_changed_bytes_are_never_returned(store: PayloadStore, store_url: str) -> None:
    good, bad = store.put(b"good"), store.put(b"right")
    _overwrite(store_url, bad, b"wrong")
    assert store.get(good) == b"good"
    with pytest.raises(CorruptPayload, match=bad):
        store.get(bad)
    errors = {digest: str(error) for digest, error in store.check_all() if error is not None}
    assert errors.keys() == {bad}
    assert bad in errors[bad]


@pytest.mark.parametrize("length", [0, 3, 19_000])
def test_what_a_loss_of_power_left_is_right_after_a_put(store: PayloadStore, store_url: str, length: int) -> None:
    """A file that is cut short, or of the right length, and zeros."""
    data = b"tokens of a rollout" * 1000
    digest = store.put(data)
    _overwrite(store_url, digest, bytes(length))
    with pytest.raises(CorruptPayload):
        store.get(digest)
    assert store.put(data) == digest
    assert store.get(digest) == data
    assert list(store.check_all()) == [(digest, None)]


def test_a_file_that_can_not_be_read_is_written_anew(tmp_path: Path) -> None:
    store = open_payloads(str(tmp_path / "log.db"))
    digest = store.put(b"tokens")
    place = tmp_path / "log.db.payloads" / digest[:2] / digest
    place.unlink()
    place.symlink_to(tmp_path / "a link to nothing")
    assert store.put(b"tokens") == digest
    assert store.get(digest) == b"tokens"


def test_columns_of_a_delivered_payload_are_completed_from_the_raw_ones(store: PayloadStore) -> None:
    groups = [[small(reward=float(run), info={"run": run}) for run in range(3)] for _ in range(2)]
    for task, group in enumerate(groups):
        for run, e in enumerate(group):
            e.eid = EID(1, task, run, 0, "s")
    refs = [PayloadRef(digest=store.put(Experience.serialize_many(group)), first=0, count=3) for group in groups]
    raw: dict[str, bytes] = {}
    found = read_experiences(store, refs, raw)
    for e in found:
        e.advantages = np.full(2, e.reward, np.float32)
    written = write_delivered(store, found[::-1], raw)
    assert read_columns(store, written).experiences() == found[::-1]
    columns = read_columns(store, written, mapped=True)
    assert columns.experiences() == found[::-1]
    assert columns.advantages.values.tolist() == [2.0, 2.0, 1.0, 1.0, 0.0, 0.0] * 2
    assert columns.tokens.values.tolist() == [1, 2, 3, 4] * 6


@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_a_view_has_the_same_bytes_and_is_checked(store: PayloadStore, store_url: str, size: int) -> None:
    data = b"a" * size
    digest = store.put(data)
    assert bytes(store.view(digest)) == data
    with pytest.raises(PayloadNotFound, match="0" * 64):
        store.view("0" * 64)
    _overwrite(store_url, digest, b"x" * 300_000)
    with pytest.raises(CorruptPayload, match=f"{digest}.* was changed"):
        store.view(digest)


def test_a_mapped_file_is_written_by_nobody_and_outlives_its_name(tmp_path: Path) -> None:
    store = open_payloads(str(tmp_path / "log.db"))
    digest = store.put(b"x" * 300_000)
    view = store.view(digest)
    np.frombuffer(view, np.uint8)[:] = 0
    assert store.get(digest) == b"x" * 300_000
    store.delete(digest)
    assert bytes(view) == bytes(300_000)


def _overwrite(url: str, digest: str, data: bytes) -> None:
    parsed = parse_url(url)
    place = recorded_place(url, patience=1.0)
    if place.startswith("s3:"):
        import obstore
        from obstore.store import from_url

        obstore.put(from_url(place, client_options={"allow_http": True}), f"{digest[:2]}/{digest}", data)
    elif place:
        (folder_of(place) / digest[:2] / digest).write_bytes(data)  # type: ignore[operator]
    elif url.startswith("sqlite"):
        Path(f"{parsed.database}.payloads", digest[:2], digest).write_bytes(data)
    else:
        engine = create_engine(parsed)
        with engine.begin() as connection:
            connection.execute(text("UPDATE es_payload SET data = :data WHERE digest = :digest"),
                               {"data": data, "digest": digest})
        engine.dispose()


@pytest.mark.parametrize("store_url", BACKENDS, indirect=True)
def test_without_create_a_store_that_is_not_there_is_told(store_url: str) -> None:
    with pytest.raises(LogNotFound, match="no payload store"):
        open_payloads(store_url, create=False)


def test_many_threads_may_put_the_same_and_different_bytes(store: PayloadStore) -> None:
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(10):
                store.put(b"same")
                assert store.get(store.put(f"{n} {i}".encode()))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors
    assert [error for _, error in store.check_all()] == [None] * 41


def test_a_full_disk_is_told_and_leaves_no_half_payload(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from trinity_es.events.errors import LogUnavailable\n"
        "from trinity_es.events.store.payloads.payloads import open_payloads\n"
        "store = open_payloads(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "store.put(b'x' * 1000)\n"
        "try:\n"
        "    store.put(b'y' * 1001)\n"
        "except LogUnavailable as e:\n"
        "    assert 'free space' in str(e), e\n"
        "    sys.exit(0)\n"
        "sys.exit('stored')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log.db")], cwd=ROOT, timeout=60, check=True)
    files = [f for f in (tmp_path / "log.db.payloads").rglob("*") if f.is_file()]
    assert [f.name for f in files] == [digest_of(b"x" * 1000)]


def test_a_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogUnavailable, match="can't be made"):
        open_payloads(str(tmp_path / "file" / "log.db"))


def test_a_put_into_a_folder_of_a_killed_put_syncs_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "log.db.payloads"
    (root / digest_of(b"one")[:2]).mkdir(parents=True)  # and was killed
    store = open_payloads(str(tmp_path / "log.db"))
    synced: list[Path] = []
    monkeypatch.setattr("trinity_es.events.store.payloads.payloads.sync", synced.append)
    digest = store.put(b"one")
    assert root in synced
    again = open_payloads(str(tmp_path / "log.db"))
    synced.clear()
    again.put(b"one")
    assert {root, root / digest[:2], root / digest[:2] / digest} <= set(synced), "the bytes lay there already"
    synced.clear()
    again.put(b"one")
    assert root not in synced, "once is enough"


def test_a_put_that_dies_before_its_end_leaves_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    store = open_payloads(str(tmp_path / "log.db"))
    monkeypatch.setattr("trinity_es.events.atomic_file.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        store.put(b"half")
    monkeypatch.undo()
    assert store.size(digest_of(b"half")) is None
    assert list(store.digests()) == []
    assert store.get(store.put(b"half")) == b"half"
