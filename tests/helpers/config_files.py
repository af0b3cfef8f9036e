"""Config files, and their errors."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from trinity_es.config.config import load_config
from trinity_es.events.errors import ConfigError, UnknownWorkflow

__all__ = ["problems", "refused", "write"]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(dedent(text))
    return path


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of a config with this text, and of the files and classes that it names."""
    with pytest.raises((ConfigError, UnknownWorkflow)) as e:
        load_config(write(folder, text)).check()
    return [p.replace(str(folder) + os.sep, "").removeprefix("run.yaml ") for p in e.value.details["problems"]]


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        load_config(write(folder, text), overrides)
    return str(e.value).replace(str(folder) + os.sep, "")
