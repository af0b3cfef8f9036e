"""The table of docs/HALF_AN_ANSWER.md says which sampling options let a part of an answer go on, as the code does."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from trinity_es.actors.config.run_sections import ProgressConfig
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.vllm.server import _FURTHER, _STATEFUL
from trinity_es.actors.rollout.run_journal import unresumable_option
from trinity_es.events.journal import MOST_SPLICES

PAGE = (ROOT / "docs" / "HALF_AN_ANSWER.md").read_text()
OTHERS: dict[str, Any] = {"stop": ("x",), "json_schema": "{}", "adapter": "math", "logprobs": False, "ignore_eos": True}


def told() -> dict[str, bool]:
    """Return by option whether the page says that a part goes on."""
    table = PAGE.partition("| option | a part |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    pairs = [(name, said.strip()) for names, said in rows for name in re.findall(r"`(\w+)`", names)]
    assert all(said.startswith(("goes on", "begins again")) for _, said in pairs)
    assert len(pairs) == len(dict(pairs))
    return {name: said.startswith("goes on") for name, said in pairs}


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_the_page_says_of_each_sampling_field_whether_a_part_goes_on(name: str) -> None:
    value = OTHERS.get(name, 3)
    assert value != getattr(Sampling(), name)
    assert told()[name] == (unresumable_option(replace(Sampling(), **{name: value})) == "")


def test_the_page_has_each_further_option_of_vllm_and_no_other() -> None:
    own = {field.name for field in fields(Sampling)}
    assert {name for name, goes_on in told().items() if not goes_on} - own == set(_STATEFUL)
    assert {name for name, goes_on in told().items() if goes_on} - own == set(_FURTHER) - set(_STATEFUL)


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    assert f"spliced at most {MOST_SPLICES} times" in PAGE
    assert f"`explorer.progress.max_bytes` ({ProgressConfig().max_bytes // 2**20} MiB)" in PAGE
    assert f"`explorer.progress.seconds` of tokens are generated again ({ProgressConfig().seconds:.0f} s" in PAGE
