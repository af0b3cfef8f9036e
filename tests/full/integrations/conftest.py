"""TRL beside our own packages, for scripts that train with it."""

from __future__ import annotations

import os

import pytest

from tests.helpers.client_packages import TRL, installed
from tests.helpers.paths import ROOT


@pytest.fixture(scope="session")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which a script finds TRL, and us."""
    folder = installed(tmp_path_factory.mktemp("trl") / "packages", *TRL, beside=True)["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join((folder, str(ROOT))), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false"}
