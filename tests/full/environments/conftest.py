"""The environment of verifiers that these tests play, and OpenEnv's Python, each installed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import client_packages
from trinity_es.environments.installed import Installed, install
from trinity_es.events.errors import ConfigError

LETTERS = Path(__file__).parent / "letters"
OPENENV = "openenv==0.10.0"


@pytest.fixture(scope="package")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The environment, installed as a user installs it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRINITY_ES_ENVIRONMENTS", str(tmp_path_factory.mktemp("environments")))
        try:
            found = install(str(LETTERS))
        except ConfigError as e:
            pytest.skip(f"verifiers can't be installed here: {e}")
        yield found


@pytest.fixture(scope="package")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python that OpenEnv's servers run in."""
    return client_packages.installed(tmp_path_factory.mktemp("openenv") / "venv", OPENENV)["PYTHON"]
