"""A disk that takes no more: everybody is answered at once and told which, and all goes on by itself afterwards."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.database_trouble import births
from tests.helpers.runs import command, make_config
from tests.helpers.systems import StartSystem, limit_file_size, pid_of, play_batch, sleepers
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogRewound, LogUnavailable
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
SOON = 8.0
"""Longest that an answer may take, in seconds."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True,
                             text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no right to mount a disk: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):  # noqa: PT012  # it is the n-th write that fails
                while True:
                    file.write(b"x" * size)
    return filler


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    try:
        found = call()
    except Exception as e:
        found = e
    return found, time.monotonic() - began


def on(disk: Path) -> dict[str, Any]:
    return {"store": {"url": f"sqlite:///{disk}/log.sqlite"}}


def everything_is_answered(client: RolloutClient, where: str) -> None:
    """At once, and in the words of `where`."""
    for _ in range(2):
        for call in (
            lambda: client.submit_batch(batch_id="refused", tasks=sleepers(2), batch_type="train"),
            lambda: client.finalize_train_batch(1, timeout=15),
            lambda: client.finalize_train_batch(1),
            lambda: client.abort_batch(1, reason="no"),
            lambda: client.next_batch(timeout=15),
        ):
            found, seconds = timed(call)
            assert isinstance(found, LogUnavailable), found
            assert where in str(found)
            assert seconds < SOON, f"{call} was answered after {seconds:.1f} s"
    status, seconds = timed(client.status)
    assert seconds < SOON
    assert where in status["trouble"]
    why, seconds = timed(lambda: client.why(1))
    assert seconds < SOON
    assert where in str(why)
    assert "everything goes on by itself" in str(why)
    rows, seconds = timed(client.log.batches)
    assert seconds < SOON
    assert [row.batch_id for row in rows] == [1]


def is_whole(client: RolloutClient, tasks: int) -> None:
    """Batch 1 is finalized; every task of it finished once, none failed; what was refused is not there."""
    result = client.finalize_train_batch(1, timeout=60)
    assert result["finished_task_count"] == tasks
    events = [r.event for r in client.log.events(1)]
    assert Counter(e.task for e in events if isinstance(e, ev.TaskFinished)) == Counter(range(tasks))
    assert not [e for e in events if isinstance(e, ev.AttemptFailed)]
    assert sorted(e.eid.task for e in client.experiences(1)) == list(range(tasks))
    assert [row.batch_id for row in client.log.batches()] == [1]
    assert client.log.verify() == []


def test_a_full_disk_is_named_to_everybody_at_once_and_passes_by_itself(start_system: StartSystem, disk: Path) -> None:
    client = start_system(**on(disk))
    client.submit_batch(batch_id=1, tasks=sleepers(24, seconds=0.3), batch_type="train")
    filler = fill(disk)
    wait_until(lambda: any(r["trouble"] for r in client.status()["runners"]), "the runner's word on its payloads")
    assert "its runner can't store what it finished" in client.why(1)
    everything_is_answered(client, f"the disk of {disk} is full (0 B of 4 MiB are free, about")
    filler.unlink()
    is_whole(client, 24)
    assert births(client) == 1
    resumed = [r.event for r in client.log.events() if isinstance(r.event, ev.WritingResumed)]
    assert resumed
    assert str(disk) in resumed[0].error
    assert client.status()["trouble"] is None
    wait_until(lambda: not any(r["trouble"] for r in client.status()["runners"]), "the runner's word that all is well")


def test_a_run_on_a_full_disk_says_what_it_waits_for_and_when_it_goes_on(disk: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, trainer={}, mode="explore", **on(disk))
    run = command("run", config, cwd=tmp_path)
    wait_until(lambda: run.stdout.readline().startswith("step 1"), "the first step")  # type: ignore[union-attr]
    filler = fill(disk)
    lines = iter(run.stderr.readline, "")  # its monitor may meet the full disk before
    told = next(line for line in lines if line.startswith("the run waits: "))
    assert re.search(rf"the disk of {disk}\S* is full \(0 B of 4 MiB are free, about", told)
    filler.unlink()
    out, _ = run.communicate(timeout=60)
    assert (run.returncode, "batches " in out) == (0, True)


def test_a_coordinator_that_starts_on_a_full_disk_says_so(start_system: StartSystem, disk: Path) -> None:
    client = start_system(**on(disk))
    client.submit_batch(batch_id=1, tasks=sleepers(8, seconds=0.2), batch_type="train")
    filler = fill(disk)
    first = pid_of(client, "coordinator")
    psutil.Process(first).kill()
    wait_until(lambda: pid_of(client, "coordinator") != first, "another coordinator")
    wait_until(lambda: "trouble" in client.status(), "its word")
    everything_is_answered(client, f"the disk of {disk} is full")
    filler.unlink()
    is_whole(client, 8)
    assert births(client) == 2


def test_a_limit_of_file_sizes_is_answered_like_a_full_disk(start_system: StartSystem) -> None:
    """As a quota is: there is room on the disk, and this process may not have it."""
    client = start_system()
    client.submit_batch(batch_id=1, tasks=sleepers(16, seconds=0.2), batch_type="train")
    wal = Path(client.config.store.url.removeprefix("sqlite:///") + "-wal")
    limit_file_size(client, wal.stat().st_size)  # not less: its text logs are no part of this
    wait_until(lambda: client.status()["trouble"] is not None, "the limit to be noticed")
    everything_is_answered(client, "takes no more (")
    limit_file_size(client, psutil.RLIM_INFINITY)
    is_whole(client, 16)
    assert births(client) == 1


def test_a_deleted_log_is_not_begun_again_by_the_next_coordinator(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    play_batch(client, 1, sleepers(4))
    path = Path(client.config.store.url.removeprefix("sqlite:///"))
    os.link(path, tmp_path / "kept")
    path.unlink()
    first = pid_of(client, "coordinator")
    psutil.Process(first).kill()
    wait_until(lambda: pid_of(client, "coordinator") != first, "another coordinator")
    found, seconds = timed(lambda: client.submit_batch(batch_id=2, tasks=sleepers(2), batch_type="train"))
    assert isinstance(found, LogRewound), found
    assert seconds < SOON
    assert not path.exists()
    (tmp_path / "kept").rename(path)
    client.shutdown()
    is_whole(start_system(), 4)
