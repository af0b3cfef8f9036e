"""The version of this software, as it is written into the log."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
