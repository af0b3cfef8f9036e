"""Payloads in a bucket or a shared folder: their place in the log, trouble that is waited for, and clear errors."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import cli
from tests.helpers.s3_server import BUCKET, S3Server, refusing_server, s3_server
from trinity_es.events.errors import (
    AlreadyRunning,
    ConfigError,
    CorruptPayload,
    LogTooNew,
    LogUnavailable,
    PayloadNotFound,
)
from trinity_es.events.store.database import schema
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.move import move_payloads
from trinity_es.events.store.payloads.object_store import Objects
from trinity_es.events.store.payloads.payload_place import recorded_place, require_place_url
from trinity_es.events.store.payloads.payloads import digest_of, open_payloads, patient, settle_place
from trinity_es.projections.verify.log import verify_log


@pytest.fixture(scope="module")
def own_s3() -> Iterator[S3Server]:
    """A server that a test may stop."""
    with s3_server() as server:
        yield server


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a new log that records no place."""
    url = f"sqlite:///{tmp_path / 'log.db'}"
    EventLog.open(url, create=True, durability="process").close()
    return url


@pytest.fixture
def bucket_url(own_s3: S3Server) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_the_log_says_where_its_payloads_are(url: str, bucket_url: str) -> None:
    settle_place(url, bucket_url)
    place = recorded_place(url, patience=1.0)
    assert place.startswith(f"{bucket_url}/")
    digest = open_payloads(url).put(b"tokens")
    assert open_payloads(url, create=False).get(digest) == b"tokens"
    settle_place(url, bucket_url)
    settle_place(url, "")
    assert recorded_place(url, patience=1.0) == place


def test_two_logs_with_the_same_url_share_no_payload(tmp_path: Path, bucket_url: str) -> None:
    stores = []
    for name in "ab":
        EventLog.open(str(tmp_path / name), create=True).close()
        settle_place(str(tmp_path / name), bucket_url)
        stores.append(open_payloads(str(tmp_path / name)))
    digest = stores[0].put(b"tasks")
    assert stores[1].put(b"tasks") == digest
    stores[1].delete(digest)
    assert stores[0].get(digest) == b"tasks"


def test_a_log_that_has_payloads_keeps_their_place(url: str, bucket_url: str) -> None:
    open_payloads(url).put(b"tokens")
    with pytest.raises(ConfigError, match=r"are with it: .*payloads move --log .* s3://"):
        settle_place(url, bucket_url)
    assert recorded_place(url, patience=1.0) == ""


def test_a_log_keeps_the_place_that_it_records(url: str, bucket_url: str, tmp_path: Path) -> None:
    settle_place(url, bucket_url)
    (tmp_path / "shared").mkdir()
    with pytest.raises(ConfigError, match=rf"are in {bucket_url}/\w+: move them with"):
        settle_place(url, f"file://{tmp_path}/shared")


def test_the_first_release_refuses_a_recorded_place(url: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_REV", 1)
    EventLog.open(url).close()
    monkeypatch.undo()
    settle_place(url, bucket_url)
    EventLog.open(url).close()
    monkeypatch.setattr(schema, "SCHEMA_REV", 1)
    with pytest.raises(LogTooNew):
        EventLog.open(url)


@pytest.mark.parametrize(("bad", "message"), [
    ("ftp://host/x", "can't be stored in"),
    ("/shared/folder", "can't be stored in"),
    ("s3://key:word@bucket/x", "credentials by the environment"),
    ("s3://bucket/x?AWS_SECRET_ACCESS_KEY=word", "credentials by the environment"),
    ("s3:///x", "names no bucket"),
    ("file://host/x", "names no folder"),
    ("file:///", "names no folder"),
    ("s3://bucket/a/../b", "path"),
])
def test_a_url_that_can_not_be_a_place_is_refused(bad: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        require_place_url(bad)
    assert "word" not in str(caught.value).replace("password", "")


def test_a_missing_bucket_is_told_at_once(url: str, own_s3: S3Server) -> None:
    started = time.monotonic()
    with pytest.raises(LogUnavailable, match="no such bucket"):
        settle_place(url, "s3://no-such-bucket/x")
    assert time.monotonic() - started < 5
    assert recorded_place(url, patience=1.0) == ""


def test_a_missing_folder_is_told(url: str, tmp_path: Path) -> None:
    """It may be a share that is not mounted, so it is not made."""
    with pytest.raises(ConfigError, match="mount"):
        settle_place(url, f"file://{tmp_path}/not-mounted")
    (tmp_path / "share").mkdir()
    settle_place(url, f"file://{tmp_path}/share")
    (tmp_path / "share").rename(tmp_path / "away")
    with pytest.raises(LogUnavailable, match="mount"):
        open_payloads(url)
    assert not (tmp_path / "share").exists()


def test_a_missing_package_is_told(url: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"trinity-es\[objects\]"):
        settle_place(url, bucket_url)


def test_http_has_to_be_allowed(bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(LogUnavailable, match="AWS_ALLOW_HTTP=true"):
        Objects(bucket_url, 5.0).require_bucket()


def _doctor_on(place: str, folder: Path, key: str = "payloads") -> Any:
    """Return what `doctor` finds out about a config's place of payloads, or (`key` is `url`) a log's."""
    config = folder / "config.yaml"
    config.write_text(f"explorer: {{rollout_model: {{engine_type: scripted}}}}\nstore: {{{key}: '{place}'}}\n")
    done = cli("doctor", config, "--json")
    [found] = [f for f in json.loads(done.stdout)["findings"] if f["what"] == "payloads"]
    assert done.exit_code == (found["verdict"] != "ok")
    return found


def test_doctor_writes_reads_and_deletes_an_object(bucket_url: str, tmp_path: Path) -> None:
    found = _doctor_on(bucket_url, tmp_path)
    assert (found["verdict"], "written, read and deleted" in found["told"]) == ("ok", True)
    assert list(Objects(bucket_url, 1.0).digests()) == []


def test_doctor_names_what_is_wrong_with_a_place(
    own_s3: S3Server, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such bucket" in _doctor_on("s3://no-such-bucket/x", tmp_path)["told"]
    assert _doctor_on(f"file://{tmp_path}/not-mounted", tmp_path)["verdict"] == "missing"
    assert _doctor_on(f"file://{tmp_path}", tmp_path)["verdict"] == "ok"
    with refusing_server(403, "AccessDenied", 1) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        assert "check AWS_..." in _doctor_on(bucket_url, tmp_path)["told"]


def test_doctor_looks_at_the_place_that_the_log_records(url: str, bucket_url: str, tmp_path: Path) -> None:
    settle_place(url, bucket_url)
    assert recorded_place(url, patience=1.0) in _doctor_on(url, tmp_path, "url")["told"]


def test_no_error_shows_a_credential(bucket_url: str, monkeypatch: pytest.MonkeyPatch, own_s3: S3Server) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1/a-secret-of-tests")
    with pytest.raises(LogUnavailable) as caught:
        Objects(bucket_url, 0.0).require_bucket()
    assert "a-secret-of-tests" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(("status", "code", "passing"), [
    (503, "SlowDown", True), (500, "InternalError", True), (429, "TooManyRequests", True), (403, "AccessDenied", False),
])
def test_what_passes_is_waited_for_and_what_does_not_is_told_at_once(
    status: int, code: str, passing: bool, scheme: str, own_s3: S3Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = base64.b64encode(b"a-secret-of-tests").decode()
    with refusing_server(status, code, 2) as address:
        account = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": secret,
                   "private_key_id": ""}
        (tmp_path / "account.json").write_text(json.dumps(account))
        for name, value in {
            "AWS_ENDPOINT_URL": address, "AZURE_ENDPOINT": address, "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": "tester", "AZURE_STORAGE_ACCOUNT_KEY": secret, "GOOGLE_ALLOW_HTTP": "true",
            "GOOGLE_SERVICE_ACCOUNT": str(tmp_path / "account.json"),
        }.items():
            monkeypatch.setenv(name, value)
        store, told = Objects(f"{scheme}://{BUCKET}/x", 5.0), list[Exception]()
        started = time.monotonic()
        if passing:
            assert store.patient(5.0, told.append).put(b"tokens") == digest_of(b"tokens")
            assert len(told) == 1, "once is enough"
        else:
            variables = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}[scheme]
            with pytest.raises(LogUnavailable, match=f"refuses the credentials: check {variables}_") as caught:
                store.put(b"tokens")
            assert not caught.value.details.get("passing")
            assert secret not in str(caught.value)
        assert time.monotonic() - started < 5


def test_a_server_that_is_away_is_waited_for(url: str, own_s3: S3Server, bucket_url: str) -> None:
    settle_place(url, bucket_url)
    store = patient(open_payloads(url), 30.0)
    digest = store.put(b"before")
    own_s3.stop()
    try:
        with pytest.raises(LogUnavailable, match="does not answer") as caught:
            open_payloads(url, patience=0.3)
        assert caught.value.details["passing"]
        settle_place(url, "")  # which leaves the wait to those who use it
        timer = threading.Timer(1.0, own_s3.start)
        timer.start()
        assert store.put(b"after") == digest_of(b"after")
        timer.join()
    finally:
        if not own_s3.is_up:
            own_s3.start()
    assert sorted(store.digests()) == sorted([digest, digest_of(b"after")])


def test_many_are_read_at_once_and_in_order(url: str, bucket_url: str) -> None:
    settle_place(url, bucket_url)
    store = open_payloads(url)
    digests = [store.put(bytes([n])) for n in range(40)]
    assert list(store.get_all(digests)) == [bytes([n]) for n in range(40)]
    store.delete(digests[7])
    with pytest.raises(PayloadNotFound, match=digests[7]):
        list(store.get_all(digests))


def test_verify_reads_several_at_once(url: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle_place(url, bucket_url)
    store, get, all_read = open_payloads(url), Objects.get, threading.Barrier(4)
    for n in range(4):
        store.put(bytes([n]))

    def get_with_others(self: Objects, digest: str) -> bytes:
        all_read.wait(20)
        return get(self, digest)

    monkeypatch.setattr(Objects, "get", get_with_others)
    assert verify_log(url).payloads == 4


def test_a_key_that_is_no_payload_is_a_stray(url: str, own_s3: S3Server, bucket_url: str) -> None:
    settle_place(url, bucket_url)
    store = open_payloads(url)
    store.put(b"tokens")
    prefix = recorded_place(url, patience=1.0).removeprefix(f"s3://{BUCKET}/")
    own_s3.client().put_object(Bucket=BUCKET, Key=f"{prefix}/ab/notes.txt", Body=b"by hand")
    assert store.strays() == ["ab/notes.txt"]
    assert list(store.digests()) == [digest_of(b"tokens")]


def test_bytes_that_were_changed_are_named(url: str, own_s3: S3Server, bucket_url: str) -> None:
    settle_place(url, bucket_url)
    digest = open_payloads(url).put(b"right")
    prefix = recorded_place(url, patience=1.0).removeprefix(f"s3://{BUCKET}/")
    own_s3.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{digest[:2]}/{digest}", Body=b"wrong")
    with pytest.raises(CorruptPayload, match=digest):
        open_payloads(url).get(digest)


def test_a_log_s_payloads_are_moved_and_moved_back(url: str, bucket_url: str) -> None:
    store = open_payloads(url)
    digests = sorted(store.put(bytes([n])) for n in range(5))
    moved = cli("payloads", "move", bucket_url, "--log", url, "--delete", "--json")
    assert moved.exit_code == 0, moved.output
    assert "deleting the old copies in its own store" in moved.stderr
    told = json.loads(moved.stdout)
    assert (told["payloads"], told["copied"], told["bytes"]) == (5, 5, 5)
    assert told["place"] == recorded_place(url, patience=1.0)
    assert list(open_payloads(url).digests()) == digests
    assert list(store.digests()) == []
    back = cli("payloads", "move", "log", "--log", url)
    assert back.exit_code == 0, back.output
    assert recorded_place(url, patience=1.0) == ""
    assert list(store.digests()) == digests


def test_a_move_that_was_interrupted_is_run_again(url: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_payloads(url)
    digests = sorted(store.put(bytes([n])) for n in range(60))
    with monkeypatch.context() as patch:
        patch.setattr("trinity_es.events.store.payloads.move._record_place", _die)
        with pytest.raises(KeyboardInterrupt):
            move_payloads(url, bucket_url)
    assert recorded_place(url, patience=1.0) == ""
    again = json.loads(cli("payloads", "move", bucket_url, "--log", url, "--json").stdout)
    assert (again["payloads"], again["copied"]) == (60, 0)
    assert list(open_payloads(url).digests()) == digests == list(store.digests())


def test_a_move_that_was_killed_while_it_deleted_is_run_again(url: str, bucket_url: str) -> None:
    store = open_payloads(url)
    digests = sorted(store.put(bytes([n])) for n in range(5))
    move_payloads(url, bucket_url)
    store.delete(digests[0])
    again = cli("payloads", "move", bucket_url, "--log", url, "--delete")
    assert (again.exit_code, list(store.digests())) == (0, []), again.output
    assert list(open_payloads(url).digests()) == digests
    once_more = cli("payloads", "move", bucket_url, "--log", url, "--delete")
    assert (once_more.exit_code, list(open_payloads(url).digests())) == (0, digests), once_more.output


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_move_does_not_switch_under_a_system_that_started_meanwhile(url: str, bucket_url: str) -> None:
    open_payloads(url).put(b"tokens")

    def start(done: int) -> None:
        with EventLog.open(url) as log:
            log.acquire_lease("coordinator", {})

    with pytest.raises(AlreadyRunning, match="while its payloads were copied"):
        move_payloads(url, bucket_url, progress=start)
    assert recorded_place(url, patience=1.0) == ""


def test_a_copy_of_a_log_does_not_run_on_the_payloads_of_its_original(url: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    shared = f"file://{tmp_path}/shared"
    settle_place(url, shared)
    digest = open_payloads(url).put(b"tokens")
    place = recorded_place(url, patience=1.0)
    copy = f"sqlite:///{shutil.copy(tmp_path / 'log.db', tmp_path / 'copy.db')}"
    assert open_payloads(copy, create=False).get(digest) == b"tokens", "it can be read"
    with pytest.raises(ConfigError, match=rf"is a copy of .*log\.db, .* in {place} belong: .*move .* {shared}`"):
        settle_place(copy, shared)
    refused = cli("payloads", "move", shared, "--log", copy, "--delete")
    assert (refused.exit_code, "would delete the payloads of" in refused.stderr) == (2, True)
    moved = cli("payloads", "move", shared, "--log", copy)
    assert moved.exit_code == 0, moved.output
    settle_place(copy, shared)
    assert recorded_place(copy, patience=1.0) != place == recorded_place(url, patience=1.0)
    open_payloads(copy).delete(digest)
    assert open_payloads(url).get(digest) == b"tokens"


def test_a_log_that_was_moved_is_no_copy_and_a_copy_can_take_the_payloads_over(url: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    settle_place(url, shared := f"file://{tmp_path}/shared")
    place = recorded_place(url, patience=1.0)
    copy = f"sqlite:///{shutil.copy(tmp_path / 'log.db', tmp_path / 'copy.db')}"
    taken = cli("payloads", "move", place, "--log", copy)
    assert taken.exit_code == 0, taken.output
    settle_place(copy, shared)
    assert recorded_place(copy, patience=1.0) == place
    shutil.copy(tmp_path / "log.db", tmp_path / "restored.db")
    (tmp_path / "log.db").unlink()
    settle_place(f"sqlite:///{tmp_path / 'restored.db'}", shared)
