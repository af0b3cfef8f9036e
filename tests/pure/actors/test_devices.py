"""Which GPUs an engine gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trinity_es.actors.engines import devices
from trinity_es.actors.engines.devices import cuda_visible_devices, device_environment, engine_beyond_gpus


def test_engines_take_gpus_in_line() -> None:
    places = devices.first_gpus([("runner-0", 2), ("runner-1", 2), ("judge-0", 1), ("judge-1", 1)])
    assert places == {"runner-0": 0, "runner-1": 2, "judge-0": 4, "judge-1": 5}
    names = [str(i) for i in range(6)]
    counts = {"runner-0": 2, "runner-1": 2, "judge-0": 1, "judge-1": 1}
    assert [cuda_visible_devices(names, places[n], counts[n]) for n in places] == ["0,1", "2,3", "4", "5"]


def test_with_fewer_gpus_than_engines_they_share() -> None:
    assert [cuda_visible_devices(["3", "5"], first, 1) for first in range(3)] == ["3", "5", "3"]
    assert cuda_visible_devices(["0", "1", "2"], 2, 2) == "2,0"


@pytest.mark.parametrize(("names", "count"), [([], 1), (["0"], 2)])
def test_where_there_are_none_or_too_few_nothing_is_changed(names: list[str], count: int) -> None:
    assert cuda_visible_devices(names, 0, count) is None


def test_an_engine_that_spans_more_gpus_than_there_are_is_named() -> None:
    engines = [("rollout", 2), ("judge", 4)]
    assert [engine_beyond_gpus(engines, gpus) for gpus in (8, 4, 3, 1)] == ["", "", "judge", "rollout"]
    assert engine_beyond_gpus(engines, 0) == "", "an engine of cores, or it says itself what it lacks"


def test_what_the_user_allowed_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 4, GPU-abc ")
    assert devices.visible_gpus() == ["4", "GPU-abc"]
    for nothing in ("", "-1", " -1,0"):  # CUDA ignores all after an invalid name
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert devices.visible_gpus() == []


def test_without_a_gpu_engines_share_out_the_cores() -> None:
    assert [devices.core_share(range(16), n, 2) for n in range(2)] == [list(range(7)), list(range(8, 15))]
    for cores, of in ((range(8), 1), (range(3), 2), ([], 2)):
        assert devices.core_share(cores, 0, of) == []  # it chooses itself
    for of in range(2, 9):
        each = [devices.core_share(range(17), n, of) for n in range(of)]
        assert all(each)
        mine = [cpu for cpus in each for cpu in cpus]
        assert len(mine) == len(set(mine)) <= 17 - of, "two engines on one core, or none left to schedule"


def test_of_a_physical_core_one_cpu_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert devices.usable_cores(tmp_path) == [0, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 7}, raising=False)  # what a container was given
    assert devices.usable_cores(tmp_path) == [2, 3, 7]


def test_the_environment_tells_an_engine_its_place_and_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("trinity_es.actors.engines.devices.usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_environment(1, 1, 2) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert [device_environment(n, 1, 2) for n in range(2)] == [{"VLLM_CPU_OMP_THREADS_BIND": cpu} for cpu in ("0", "2")]
    assert device_environment(0, 1, 1) == device_environment(0, 2, 4) == {}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "3")
    assert device_environment(0, 1, 2) == {}
