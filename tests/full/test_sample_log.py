"""The sample log is a sound log, the same each time, and as nasty as it is asked to be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sample_log import make
from benchmarks.sample_run import HOSTILE
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.projections.reading.log_reader import open_log


@pytest.mark.parametrize("options", [
    {}, {"hostile": True}, {"alive": True}, {"dead": True}, {"keep": 3}, {"payloads": False},
], ids=str)
def test_it_is_sound(path: Path, options: dict[str, Any]) -> None:
    make(str(path), batches=12, tasks=6, **options)
    with open_log(str(path)) as log:
        assert log.verify() == []
        rows, whys = log.batches(), log.why_open()
        assert sum(row.batch_type == "eval" for row in rows) == 1
        assert {row.state for row in rows} >= {"finalized", "aborted"}
        last = max(log.read(after=log.head().position - 1), key=lambda r: r.position)
        assert (time.time() - last.recorded_at < 60) == ("alive" in options)
        if "alive" in options or "dead" in options:
            assert [w.batch_id for w in whys] == [12]
            assert ("its processes are gone" in str(whys[0])) == ("dead" in options)
        else:
            assert whys == []


def test_the_same_arguments_give_the_same_events_and_payloads(tmp_path: Path) -> None:
    told = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(str(tmp_path / name), batches=3, tasks=4, seed=seed)
        with open_log(str(tmp_path / name)) as log:
            told.append(log.head().hash)
    assert told[0] == told[1] != told[2]


def test_a_hostile_one_has_a_text_of_a_megabyte_and_every_kind_of_trouble(path: Path) -> None:
    make(str(path), batches=30, tasks=8, hostile=True)
    texts = set()
    with open_log(str(path)) as log:
        store = log.payloads()
        for recorded in log.read_rare(["BatchFinalized"]):
            for ref in recorded.event.experiences:
                for e in read_experiences(store, [ref]):
                    texts.add(e.response_text or "")
        store.close()
        messages = {r.event.message for r in log.read_rare(["AttemptFailed"]) if isinstance(r.event, ev.AttemptFailed)}
        assert any(r.batch_id == f"10/{HOSTILE[0]}" for r in log.batches())
    assert max(map(len, texts)) == 1_000_000
    assert all(any(nasty in text for text in texts) for nasty in HOSTILE[:8])
    assert messages & set(HOSTILE)


@pytest.mark.parametrize("end", ["alive", "dead"])
def test_it_ends_after_so_many_events_also_where_tasks_have_many_runs(path: Path, end: str) -> None:
    make(str(path), batches=10**9, tasks=6, runs=32, events=600, payloads=False, **{end: True})
    with open_log(str(path)) as log:
        assert 300 < log.head().position < 1200
        assert log.batches()[-1].state == "running"
