"""A folder of the head's comes to a host: equal to the last byte, once, gone on with where a connection broke."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.links import OTHER, Heard, Network, dialer, joined, network
from trinity_es.actors.hosts import folder_puller, folder_sender
from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.folder_files import FileFacts, FolderName, list_files
from trinity_es.actors.hosts.folder_puller import FolderPuller
from trinity_es.actors.hosts.head_client import NotOurs
from trinity_es.events.errors import SyncError
from trinity_es.testing import wait_until

MIB = 2**20
WEIGHTS = FolderName("weights", version=3)


class Head(Heard):
    """A head that gives a folder to whoever has the key, and takes hosts in."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.asked, self.refusal = folder, list[Any](), ""

    def _hello(self, said: Mapping[str, Any], where: str, answer: Callable[[Admission], None]) -> None:
        if "fetch" not in said:
            super()._hello(said, where, answer)
        else:
            self.asked.append(said["fetch"])
            answer(Admission(refused=self.refusal, folder=str(self.folder)))


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    folder = tmp_path / "published"
    folder.mkdir()
    for name, size in ("config.json", 100), ("a.safetensors", 24 * MIB + 7), ("b.safetensors", 3 * MIB), ("empty", 0):
        (folder / name).write_bytes(os.urandom(size))
    for name in "optimizer.pt", "pytorch_model.bin", ".hidden":
        (folder / name).write_bytes(b"of the trainer")
    made = Head(folder)
    yield made
    made.end.stop()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def published(head: Head) -> dict[str, bytes]:
    return {file.name: (head.folder / file.name).read_bytes() for file in list_files(head.folder)}


class Host:
    def __init__(self, folder: Path, head: Head, port: int | None = None, **way: Any) -> None:
        self.folder, self.told = folder, list[str]()
        self.puller = FolderPuller(folder, dialer(head, port, **way))

    def pull(self, own: Path | None = None) -> Path:
        return asyncio.run(self.pulling(own))

    def pulling(self, own: Path | None = None) -> Coroutine[Any, Any, Path]:
        return self.puller.pull(WEIGHTS, own, self.told.append)


@pytest.fixture
def host(head: Head, tmp_path: Path) -> Host:
    return Host(tmp_path / "host", head)


def test_a_folder_comes_equal_and_without_what_a_trainer_keeps_beside_weights(
    head: Head, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_puller, "TELL_SECONDS", 0.0)  # it takes less
    place = host.pull()
    assert place.parent == host.folder
    assert content(place) == published(head)
    assert set(content(place)) == {"config.json", "a.safetensors", "b.safetensors", "empty"}
    assert head.asked == [{"kind": "weights", "name": "", "version": 3}], "a host names no path"
    assert place.stat().st_mode & 0o077 == host.folder.stat().st_mode & 0o077 == 0
    assert any("MiB of 27.0 MiB" in told for told in host.told)


def test_shared_files_are_used_and_not_even_read(head: Head, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_sender, "hash_files", None)
    assert host.pull(head.folder) == head.folder
    assert not host.folder.exists()


def test_an_equal_copy_is_used_and_one_that_differs_in_a_bit_is_not(head: Head, host: Host, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(head.folder, copy)
    assert host.pull(copy) == copy
    assert not host.folder.exists()
    data = bytearray((copy / "b.safetensors").read_bytes())
    data[MIB] ^= 1
    (copy / "b.safetensors").write_bytes(data)
    place = host.pull(copy)
    assert place != copy
    assert content(place) == published(head)


@contextmanager
def pulled_slowly(head: Head, tmp_path: Path) -> Iterator[tuple[Host, Network]]:
    with network(head.port) as between:
        yield Host(tmp_path / "host", head, between.port), between


def test_two_processes_never_write_one_file(head: Head, tmp_path: Path) -> None:
    """Two hosts with one folder: the second would cut off what the first has written."""
    with pulled_slowly(head, tmp_path) as (first, between):
        second = Host(first.folder, head)
        said: list[str] = []

        def come_too() -> None:
            with pytest.raises(SyncError, match="another process is pulling the same files there") as told:
                second.pull()
            said.append(str(told.value))

        meanwhile = cut_at(between, 3 * MIB, come_too)
        place = first.pull()
        meanwhile.join(30)
        assert said
        assert content(place) == published(head)
        assert second.pull() == place, "it is here now"


def cut_at(between: Network, size: int, cut: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        wait_until(lambda: len(between.passed["to host"]) > size, f"{size} bytes", 30)
        cut()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_pull_that_is_cut_goes_on_where_it_was(head: Head, tmp_path: Path) -> None:
    with pulled_slowly(head, tmp_path) as (host, between):
        cuts = [cut_at(between, size * MIB, between.cut) for size in (6, 14, 22)]
        place = host.pull()
        for cut in cuts:
            cut.join()
        assert content(place) == published(head)
        assert len(head.asked) >= 3
        assert len(between.passed["to host"]) < 27 * MIB + 3 * 5 * MIB, "only what was on its way is sent again"


def test_another_life_goes_on_with_what_an_earlier_one_pulled(head: Head, tmp_path: Path) -> None:
    with pulled_slowly(head, tmp_path) as (host, between):
        def head_is_away() -> None:
            between.to(1)
            between.cut()

        gone = cut_at(between, 12 * MIB, head_is_away)
        host.puller._dialer.timeout = 0.3
        with pytest.raises(SyncError, match=r"version 3 can't be pulled from the head: .*that arrived are kept"):
            host.pull()
        gone.join()
        between.to(head.port)
        before = len(between.passed["to host"])
        [part] = host.folder.iterdir()
        with (part / "a.safetensors").open("r+b") as file:  # and its memory was not sound
            file.seek(MIB)
            file.write(b"another")
        again = Host(host.folder, head, between.port)
        place = again.pull()
        assert content(place) == published(head)
        sent = len(between.passed["to host"]) - before
        assert sent > 27 * MIB, "the file was pulled whole, as its digest did not fit"


def test_a_bit_that_changes_on_the_wire_is_noticed_and_the_rest_goes_on(head: Head, tmp_path: Path) -> None:
    with pulled_slowly(head, tmp_path) as (host, between):
        spoiled = cut_at(between, 8 * MIB, lambda: setattr(between, "spoils", "to host"))
        place = host.pull()
        spoiled.join()
        assert content(place) == published(head)
        assert len(head.asked) == 2


def test_files_that_are_not_the_head_s_are_unused(head: Head, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the head's disk gives other bytes the second time."""
    async def others(folder: Path, files: Sequence[FileFacts], room: Any) -> list[str]:
        return ["0" * 64] * len(files)

    right = folder_sender.hash_files
    monkeypatch.setattr(folder_sender, "hash_files", others)
    with pytest.raises(SyncError, match=r"does not match the SHA-256 digest that the head sent, twice"):
        host.pull()
    assert not [path for path in host.folder.iterdir() if not path.name.startswith(".")]
    monkeypatch.setattr(folder_sender, "hash_files", right)
    os.utime(head.folder / "a.safetensors")  # the head hashes it again
    assert content(host.pull()) == published(head)


def test_files_that_change_while_they_are_pulled_come_as_they_are_now(head: Head, tmp_path: Path) -> None:
    with pulled_slowly(head, tmp_path) as (host, between):
        def write() -> None:
            (head.folder / "b.safetensors").write_bytes(b"new" * MIB)
            (head.folder / "a.safetensors").write_bytes(b"less")

        written = cut_at(between, 4 * MIB, write)
        place = host.pull()
        written.join()
        assert content(place) == published(head)


def test_a_copy_is_looked_at_again_by_another_life_and_made_good(head: Head, host: Host) -> None:
    place = host.pull()
    assert host.pull() == place
    with (place / "a.safetensors").open("r+b") as file:
        file.write(b"another")
    again = Host(host.folder, head)
    assert again.pull() == place
    assert content(place) == published(head)


def test_what_is_refused_says_why_and_is_not_asked_for_again(head: Head, host: Host, tmp_path: Path) -> None:
    head.refusal = "version 3 of the weights is not the current one: version 4 is"
    with pytest.raises(SyncError, match=r"version 3 can't be pulled from the head: .*version 4 is") as refused:
        host.pull()
    assert refused.value.details["refused"]
    assert len(head.asked) == 1
    head.refusal, head.folder = "", tmp_path / "nowhere"
    with pytest.raises(SyncError, match=r"the head does not find .* where it was published: No such file"):
        host.pull()
    own = tmp_path / "shared by hosts"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert host.pull(own) == own


def test_a_head_that_fails_each_time_is_an_error(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any) -> list[str]:
        raise OSError(5, "Input/output error")

    host = Host(tmp_path / "host", head, timeout=1.0)
    monkeypatch.setattr(folder_sender, "hash_files", broken)
    with pytest.raises(SyncError, match=r"which can't read it: .*Input/output error"):
        host.pull()
    monkeypatch.setattr(folder_sender, "hash_files", None)  # something that nobody thought of
    with pytest.raises(SyncError, match=r"version 3 can't be pulled from the head"):
        host.pull()
    assert 1 < len(head.asked) < 20


def test_a_version_that_was_pulled_is_there_when_the_head_s_is_not(head: Head, host: Host) -> None:
    place = host.pull()
    shutil.rmtree(head.folder)
    assert host.pull() == place


def test_who_has_not_the_key_gets_nothing(head: Head, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", head, timeout=0.3, key=lambda: OTHER)
    with pytest.raises(SyncError, match="another key"):
        host.pull()
    assert head.asked == []
    assert not host.folder.exists()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "..", "a/b", ""])
def test_a_head_s_file_lies_in_the_folder_and_nowhere_else(name: str) -> None:
    with pytest.raises(NotOurs, match="listed a file named"):
        folder_puller._parse_file(name, 1, (1, 1, 1))


@pytest.mark.parametrize("asked", ["4", "-1", "..%2f..%2fetc%2fpasswd", "config.json"])
def test_a_host_that_asks_for_what_there_is_not_gets_nothing(head: Head, asked: str) -> None:
    async def ask() -> None:
        async with dialer(head).session() as session:
            async with session.post("/folders", json={"fetch": {}}) as answer:
                id = (await answer.json())["id"]
            async with session.get(f"/folders/{id}/{asked}"):
                pass

    with pytest.raises(ConnectionError, match="404"):
        asyncio.run(ask())


def test_who_asks_for_files_joins_nothing_whatever_it_says(head: Head) -> None:
    async def ask() -> None:
        async with dialer(head).session() as session, session.post("/folders", json={"name": "b", "life": "1"}):
            pass

    asyncio.run(ask())
    assert (head.hellos, head.asked) == ([], [None])


def test_too_little_room_is_told_at_the_beginning(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_puller, "SPARE_BYTES", 2**60)
    with pytest.raises(SyncError, match=r"the files take 27.0 MiB, but .* free: .*hosts.weights_dir"):
        Host(tmp_path / "host", head).pull()


def test_a_host_that_takes_nothing_keeps_neither_messages_nor_other_hosts_waiting(head: Head, tmp_path: Path) -> None:
    (head.folder / "a.safetensors").write_bytes(os.urandom(64 * MIB))
    with joined(head) as control:
        wait_until(lambda: bool(control.ups), "the host's own connection", 10)
        with pulled_slowly(head, tmp_path) as (slow, between):
            stalled = cut_at(between, 4 * MIB, lambda: setattr(between, "stalled", "to host"))

            async def both() -> None:
                stuck = asyncio.ensure_future(slow.pulling())
                await asyncio.to_thread(stalled.join)
                for n in range(100):
                    control.end.send("runner-0@b", n)
                place = await asyncio.wait_for(Host(tmp_path / "other", head).pulling(), 30)
                assert content(place) == published(head)
                assert not stuck.done()
                stuck.cancel()
                await asyncio.wait({stuck}, timeout=10)
                assert stuck.done(), "a pull that is not wanted any more ends"

            asyncio.run(both())
            wait_until(lambda: len(head.items) >= 100, "the messages of the host", 10)


def test_what_is_not_used_any_more_is_removed(head: Head, host: Host) -> None:

    async def pulled(name: FolderName) -> Path:
        return await host.puller.pull(name, None, host.told.append)

    adapter = FolderName("adapter", "math/one", 1)
    places = [asyncio.run(pulled(name)) for name in (WEIGHTS, FolderName("weights", version=4), adapter)]
    (host.folder / ".weights-2-abc.part").mkdir()
    asyncio.run(host.puller.delete_all_but({"weights-4", adapter.label}))
    assert set(host.folder.iterdir()) == set(places[1:])
