"""The environment of verifiers that these tests play, and OpenEnv's Python, each installed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.client_packages import LETTERS, OPENENV, environment, installed
from trinity_es.environments.installs import Installed


@pytest.fixture(scope="package")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRINITY_ES_ENVIRONMENTS", str(tmp_path_factory.mktemp("environments")))
        yield environment(LETTERS)


@pytest.fixture(scope="package")
def openenv_python() -> str:
    """The Python that OpenEnv's servers run in."""
    return installed(OPENENV)["PYTHON"]
