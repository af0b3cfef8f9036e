"""Metrics that a trainer returns of a step: numbers are recorded, and what is no number ends no run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from trinity_es.cli import _error_line as error_line
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.projections.reading.resume_point import ResumePoint
from trinity_es.run.checkpointing import TrainerCheckpoints
from trinity_es.run.trainer import learn

ONE = ExperienceColumns.of([Experience(tokens=[1, 2], prompt_length=1)])


class Trainer:
    def __init__(self, said: Any) -> None:
        self.said = said

    def step(self, experiences: ExperienceColumns) -> Any:
        return self.said

    def save(self, path: str) -> None: ...


def test_numbers_of_every_kind_are_metrics() -> None:
    said = {"loss": np.float32(0.5), "steps": 3, "done": True, "norm": np.array(2.0), 7: 1.0}
    assert learn(Trainer(said), 1, ONE) == {"loss": 0.5, "steps": 3.0, "done": 1.0, "norm": 2.0, "7": 1.0}
    assert learn(Trainer(said), 1, ONE[:0]) == {}


@pytest.mark.parametrize(("name", "value", "told"), [
    *(("grad_norm", value, "step 3: the trainer's metric grad_norm is ")
      for value in (float("inf"), float("nan"), None, "high", 10**400, np.ones(2), [1.0], b"1")),
    *((name, 1.0, "needs a name of at most 200 characters, without NUL: it is left out")
      for name in ("x" * 201, "a\0b", "\ud800")),
], ids=lambda value: ascii(value)[:20])
def test_a_metric_that_no_log_takes_is_told(name: str, value: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert learn(Trainer({"loss": 0.1, name: value}), 3, ONE) == {"loss": 0.1}
    assert told in caplog.text
    assert len(caplog.text) < 500


def test_a_trainer_that_returns_no_metrics_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert learn(Trainer(None), 3, ONE) == {}
    assert caplog.text == ""
    assert learn(Trainer([0.1]), 3, ONE) == {}
    assert "step 3: the trainer's step() returned [0.1] and not a dict of metrics" in caplog.text


def test_an_error_of_a_trainer_names_it_and_the_step() -> None:
    class Fails(Trainer):
        def step(self, experiences: ExperienceColumns) -> Any:
            raise self.said

    with pytest.raises(TypeError) as other:
        learn(Fails(TypeError("no number")), 3, ONE)
    assert [note.endswith("Fails.step raised it in step 3") for note in other.value.__notes__] == [True]
    for error in (ConfigError("no such layer"), OSError("no such layer")):
        with pytest.raises(type(error)):
            learn(Fails(error), 3, ONE)
        said = str(error_line(error))
        assert re.fullmatch(r"no such layer - tests\.pure\.test_trainer:\S+Fails\.step raised it in step 3", said)
    for end in (StopIteration(), SystemExit(3)):
        with pytest.raises(RuntimeError, match=rf"Fails\.step raised {re.escape(repr(end))} in step 3"):
            learn(Fails(end), 3, ONE)


def test_more_metrics_than_a_step_may_have_are_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    said = {f"m{i}": 1.0 for i in range(10_003)} | {"big": 10**5000}
    assert list(learn(Trainer(said), 3, ONE)) == [f"m{i}" for i in range(10_000)]
    assert [r.getMessage() for r in caplog.records] == [
        "step 3: the trainer gave more than 10000 metrics: the others are left out"]


async def test_a_checkpoint_of_another_run_that_appeared_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    weights = TrainerCheckpoints(Config.from_dict({"trainer": {"class": "a:B"}}, folder=tmp_path))
    theirs = tmp_path / "checkpoints" / "trinity" / "run" / "global_step_1"
    theirs.mkdir(parents=True)
    with pytest.raises(ConfigError, match="global_step_1 exists already, but this run did not make it"):
        await weights.save(Mock(), Mock(save=Mock(side_effect=AssertionError("written over"))), 1)
    assert list(theirs.iterdir()) == []


async def test_a_copy_of_a_run_does_not_take_the_checkpoints_of_its_original(tmp_path: Path) -> None:
    def weights(log: str) -> TrainerCheckpoints:
        return TrainerCheckpoints(Config.from_dict(
            {"trainer": {"class": "a:B"}, "store": {"url": f"sqlite:///{tmp_path}/{log}"}}, folder=tmp_path))

    (tmp_path / "log.sqlite").touch()
    await weights("log.sqlite").save(AsyncMock(), Mock(save=lambda path: Path(path).mkdir()), 1)
    point = ResumePoint(checkpoint_version=1)
    weights("log.sqlite").require_no_foreign_checkpoints(point)
    with pytest.raises(ConfigError, match=r"belongs to the run in \S+/log\.sqlite, of which"):
        weights("copy.sqlite").require_no_foreign_checkpoints(point)
    (tmp_path / "log.sqlite").rename(tmp_path / "moved.sqlite")
    weights("moved.sqlite").require_no_foreign_checkpoints(point)
