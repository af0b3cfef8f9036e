"""The version of this software, as it is written into the log."""

VERSION = "0.1.0"
