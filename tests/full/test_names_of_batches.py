"""Batches are found by the names that commands print, and printed where the output has not their letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.handmade import write
from tests.helpers.paths import ROOT
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.safe_text import batch_named

IDS: list[BatchId] = [2, "0002", "2", 7, "-0", "оценка ä€😀"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "log.sqlite"
    write(file, [(batch_stream(i), [ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1])]) for i in IDS])
    return file


@pytest.mark.parametrize(("typed", "meant"), [
    ("2", 2), ("'2'", "2"), ("0002", "0002"), ("'0002'", "0002"), ("7", 7), ("-0", "-0"), ("007", None), ("+7", None),
    ("оценка ä€😀", "оценка ä€😀"),
])
def test_a_number_is_one_as_it_is_written(path: Path, typed: str, meant: BatchId | None) -> None:
    with open_log(str(path)) as log:
        assert batch_named(log, typed) == meant


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_output_has_no_letters_for_is_printed_by_number(path: Path, encoding: str) -> None:
    def run(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trinity_es", *args, "--log", str(path)], capture_output=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding})
        return done.stdout.decode(encoding)

    assert "\\u043e\\u0446\\u0435\\u043d\\u043a\\u0430" in run("batches")
    assert [row["batch_id"] for row in json.loads(run("batches", "--json"))][-1] == IDS[-1]
    assert json.loads(run("events", "--json").splitlines()[-1])["data"]["batch_id"] == IDS[-1]
