"""Progress lines of a program that waits."""

from __future__ import annotations

import logging
import sys

__all__ = ["tell"]


def tell(logger: logging.Logger, text: str) -> None:
    """Log a line at INFO, or print it to stderr if the program did not set up logging, since INFO would not show."""
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
