"""What is told while one waits: a program by its logging or on stderr, a person by the lines of steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trinity_es.cli.render.progress import rewarded
from trinity_es.client.progress import tell
from trinity_es.projections.run import BatchProgress


def test_a_program_without_logging_is_told_on_stderr_and_another_by_its_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.Logger("bare")
    tell(logger, "engines load: 3 %")
    assert capsys.readouterr() == ("", "engines load: 3 %\n")
    logger.addHandler(logging.NullHandler())
    tell(logger, "engines load: 4 %")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("told", "line"), [
    ({}, "0.500"), ({"missing": 2}, "0.500 (2 runs missing)"), ({"dropped": 3}, "0.500 (3 filtered out)"),
    ({"missing": 2, "dropped": 3}, "0.500 (2 runs missing, 3 filtered out)"), ({"reward": None}, "none"),
])
def test_a_step_s_mean_reward_says_what_it_is_not_over_and_what_is_not_trained_on(
    told: dict[str, Any], line: str
) -> None:
    assert rewarded(BatchProgress(**{"batch_id": 1, "batch_type": "train", "tasks": 4, "reward": 0.5, **told})) == line
