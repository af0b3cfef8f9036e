"""However long the log is, nobody waits while somebody asks for what is far back in it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import sample_log
from tests.helpers.systems import StartSystem, play_batch, sleepers
from trinity_es.actors.commands import ResumeTrainer
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import WeightsPublished
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors

pytestmark = pytest.mark.slow
EVENTS = 60_000
ASKED = 24


def publish(url: str, folder: Path) -> None:
    """Weights that are there: those that the made log names are not."""
    with EventLog.open(url, durability="process", projectors=projectors()) as log:
        published = WeightsPublished(version=1_000_000, path=str(folder))
        write = Write(stream="weights", expected_version=log.stream_version("weights"), events=[published])
        log.append([write], commit_id="weights")


def test_status_is_answered_at_once_while_the_first_batches_of_a_long_log_are_asked_for(
    start_system: StartSystem, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'long.db'}"
    sample_log.make(url, batches=10_000, tasks=64, events=EVENTS, payloads=False, dead=True)
    with open_log(url) as log:
        first = next(
            r for r in log.events() if r.type == "BatchFinalized" and r.event.result["batch_type"] == "train"  # type: ignore[attr-defined]  # a BatchFinalized
        )
    publish(url, tmp_path)
    client = start_system(store={"url": url})
    play_batch(client, "mine", sleepers(4))
    slowest = 0.0
    with ThreadPoolExecutor(ASKED + 2) as pool:
        asked = [pool.submit(client.next_batch, 0, 120) for _ in range(ASKED)]
        asked_back = pool.submit(client._link.call, ResumeTrainer(step=0), 120.0)
        old = pool.submit(client.finalize_train_batch, first.event.result["batch_id"], timeout=120)  # type: ignore[attr-defined]  # as above
        while not all(one.done() for one in [*asked, asked_back, old]):
            began = time.monotonic()
            client.status(60)
            slowest = max(slowest, time.monotonic() - began)
        found = {one.result() for one in asked}
        assert found == {(first.event.result["batch_id"], first.position)}  # type: ignore[attr-defined]  # as above
        assert old.result()["batch_type"] == "train"
    assert slowest < 0.6
