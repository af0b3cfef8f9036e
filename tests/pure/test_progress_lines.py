"""What is told while one waits: a program by its logging or on stderr, a person by the lines of steps."""

from __future__ import annotations

import logging

import pytest

from trinity_es.cli.render.progress import step_reward
from trinity_es.client.progress_lines import report_progress


def test_a_program_without_logging_is_told_on_stderr_and_another_by_its_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.Logger("bare")
    report_progress(logger, "engines load: 3 %")
    assert capsys.readouterr() == ("", "engines load: 3 %\n")
    logger.addHandler(logging.NullHandler())
    report_progress(logger, "engines load: 4 %")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("missing", "dropped", "line"), [
    (0, 0, "0.500"), (2, 0, "0.500 (2 runs missing)"), (0, 3, "0.500 (3 filtered out)"),
    (1, 3, "0.500 (1 run missing, 3 filtered out)"),
])
def test_a_step_s_mean_reward_says_what_it_is_not_over_and_what_is_not_trained_on(
    missing: int, dropped: int, line: str
) -> None:
    assert step_reward(0.5, missing, dropped) == line
