"""The script of the scripted engine is checked when the engine is made."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.errors import ConfigError
from trinity_es.testing import ScriptedEngine


@pytest.mark.parametrize(("script", "told"), [
    ({"token_seconds": -1}, "token_seconds is -1 in the script: give a number of seconds, at least 0"),
    ({"token_seconds": "abc"}, "token_seconds is 'abc' in the script"),
    ({"load_seconds": float("inf")}, "load_seconds is inf in the script"),
    ({"latency_seconds": [0, "x"]}, r"latency_seconds is \[0, 'x'\] in the script: .*, or two of them"),
    ({"rules": [{}, {"latency_seconds": -2}]}, "latency_seconds is -2 in rule 2 of the script"),
])
def test_a_duration_that_is_none_is_named(script: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ScriptedEngine(EngineConfig(model_path="", options=script))


def test_durations_are_numbers_or_for_latency_two() -> None:
    script = {"token_seconds": 1, "latency_seconds": [0.0, 0.1], "rules": [{"prompt": "a"}]}
    ScriptedEngine(EngineConfig(model_path="", options=script))
