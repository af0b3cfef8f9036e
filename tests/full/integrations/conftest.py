"""TRL beside our own packages, for scripts that train with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.client_packages import TRL, installed
from tests.helpers.paths import ROOT
from tests.helpers.warm_python import WarmPython, warm_python


@pytest.fixture(scope="session")
def trl() -> dict[str, str]:
    """The variables with which a script finds TRL, and us."""
    folder = installed(*TRL, beside=True)["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join((folder, str(ROOT))), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def trl_python(trl: dict[str, str]) -> Iterator[WarmPython]:
    """A Python that has imported TRL and what its trainers need, which takes 8 s."""
    modules = ["examples.trl_grpo.train", "trinity_es.integrations.trl_async",
               "trl.experimental.async_grpo.async_grpo_trainer"]
    with warm_python(modules, trl) as python:
        yield python
