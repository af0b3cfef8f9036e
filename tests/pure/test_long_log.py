"""The long log that benchmarks copy together is one that appends could have made."""

from __future__ import annotations

from pathlib import Path

import pytest

import trinity_es
from benchmarks.long_log import lengthen
from benchmarks.recovery import config_in, make_history
from benchmarks.sample_log import make
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.verify.log import verify_log


@pytest.fixture
def config(tmp_path: Path) -> trinity_es.Config:
    found = config_in(tmp_path, runners=1, places=8)
    Path(found.store.url.removeprefix("sqlite:///")).parent.mkdir(parents=True)
    make_history(found, 1000)
    return found


def test_a_log_that_was_copied_is_sound_to_the_last_row(config: trinity_es.Config) -> None:
    with open_log(config.store.url) as log:
        events, batches = log.head().position, log.count_batches()
    assert lengthen(config.store.url, 3 * events - 1) == 3 * events
    found = verify_log(config.store.url)
    assert (found.problems, found.notes, found.events) == ([], [], 3 * events)
    with open_log(config.store.url) as log:
        assert log.count_batches() == 3 * batches
        last = log.replay(3 * batches)
        assert (last.batch_id, last.trained_step, last.final_result["batch_id"]) == (3 * batches,) * 3


def test_what_it_can_not_copy_is_refused(tmp_path: Path) -> None:
    make(f"sqlite:///{tmp_path}/log.sqlite", batches=3, tasks=4)
    with pytest.raises(ValueError, match="rm_"):
        lengthen(f"sqlite:///{tmp_path}/log.sqlite", 10_000)
