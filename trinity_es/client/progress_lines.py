"""Output of progress lines, for programs with and without logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["report_progress"]


def report_progress(logger: logging.Logger, text: str) -> None:
    """Log a line at INFO. If the program did not set up logging, INFO would not show, so print it to stderr."""
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
