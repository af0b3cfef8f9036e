"""What a host that joins must have, and what Ray is asked for it: no process, no Ray, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_es.actors.engines.devices import device_environment, first_gpus
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.hosts.join import require_gpus
from trinity_es.hosts.run_on_ray import Agent, head_config, host_resources


def config(*auxiliary: dict[str, Any], hosts: dict[str, Any] | None = None, url: str = "postgresql://u@db/run",
           **rollout: Any) -> Config:
    return Config.from_dict({
        "store": {"url": url}, "hosts": hosts or {},
        "explorer": {"rollout_model": rollout, "auxiliary_models": list(auxiliary)},
    })


@pytest.mark.parametrize(("gpus", "said"), [
    ("0,1,2,3", ""), ("0,1", "judge needs 4"), ("3", "rollout_model needs 2"), ("", ""),
])
def test_a_host_whose_gpus_an_engine_does_not_fit_on_is_refused(
    gpus: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    given = config({"name": "judge", "tensor_parallel_size": 4}, tensor_parallel_size=2)
    if not said:
        require_gpus(given, "b")
        return
    with pytest.raises(ConfigError, match=said) as refused:
        require_gpus(given, "b")
    assert f"host b may use {len(gpus.split(','))} GPUs ({', '.join(gpus.split(','))})" in str(refused.value)
    assert "--set" in str(refused.value)


def test_engines_that_span_no_gpus_of_the_host_fit_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    require_gpus(config(engine_type="scripted", tensor_parallel_size=8), "b")
    servers = {"urls": ["http://gpu-7:8000"]}
    require_gpus(config(engine_type="http", servers=servers, tensor_parallel_size=8), "b")


def test_engines_of_a_host_get_the_gpus_that_it_has_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Ray gave it too, whatever their numbers are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first = first_gpus([("runner-0@b", 2), ("runner-1@b", 2)])
    assert [device_environment(at, 2, 4) for at in first.values()] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]


def test_ray_is_asked_for_what_the_engines_of_a_host_take() -> None:
    judge = {"name": "judge", "engine_num": 2}
    given = config(judge, engine_num=3, tensor_parallel_size=2)
    assert host_resources(given, gpus=True) == {"CPU": 5.0, "GPU": 8.0}
    assert host_resources(given, gpus=False) == {"CPU": 5.0}
    assert host_resources(config(engine_type="scripted"), gpus=True) == {"CPU": 1.0}


def test_the_head_on_ray_is_at_its_node_s_address_and_only_leads() -> None:
    found = head_config(config(), "10.0.0.7")
    assert (found.hosts.address, found.hosts.engines_on_head) == ("10.0.0.7:7700", False)
    assert head_config(config(hosts={"address": "any:7800"}), "fd00::7").hosts.address == "[fd00::7]:7800"


@pytest.mark.parametrize(("given", "said"), [
    ({"url": "sqlite:///x.sqlite"}, "SQLite file, which only one host can use"),
    ({"engine_type": "http", "servers": {"urls": ["http://gpu-7:8000"]}}, "Ray has no engines to place"),
])
def test_what_ray_has_nothing_to_place_for_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        head_config(config(**given), "10.0.0.7")


def test_a_head_without_engines_needs_hosts() -> None:
    with pytest.raises(ConfigError, match=r"engines_on_head: false without an address"):
        config(hosts={"engines_on_head": False})


def test_certificates_between_hosts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hosts\.tls.*hosts speak TLS by themselves, leave it out"):
        config(hosts={"address": "10.0.0.1:7700", "tls": {"cert": "/c.pem"}})


def test_an_agent_that_can_t_do_its_work_says_so_and_goes_on_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", "to be put back")
    monkeypatch.chdir(tmp_path)
    agent = Agent({"config": {"unknown": 1}, "key": "k" * 40, "folder": "/nowhere"}, 0)
    try:
        agent._ended.wait(0.5)
        problem = agent.report()["problem"]
        assert "unknown" in problem["text"]
        assert problem["for_good"]
    finally:
        agent.leave("the test ends")
    assert not agent._thread.is_alive()
