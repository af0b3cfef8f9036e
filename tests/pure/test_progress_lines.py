"""What a program is told while it waits: by its logging, or on stderr where it has set up none."""

from __future__ import annotations

import logging

import pytest

from trinity_es.client.progress import tell


def test_a_program_without_logging_is_told_on_stderr_and_another_by_its_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.Logger("bare")
    tell(logger, "engines load: 3 %")
    assert capsys.readouterr() == ("", "engines load: 3 %\n")
    logger.addHandler(logging.NullHandler())
    tell(logger, "engines load: 4 %")
    assert capsys.readouterr() == ("", "")
