"""What a program is told while it waits."""

from __future__ import annotations

import logging
import sys

__all__ = ["tell"]


def tell(logger: logging.Logger, text: str) -> None:
    """Log a line at INFO; in a program that has set up no logging, where only warnings show, print it to stderr."""
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
