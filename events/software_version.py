"""The version of trinity_es, which is written into the log."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
