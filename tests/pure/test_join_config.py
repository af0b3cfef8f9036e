"""What a host makes of the run's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import write
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.hosts.join import host_config


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A log whose run has a judge besides its rollout model."""
    made = f"sqlite:///{tmp_path / 'log.sqlite'}"
    judge = {"name": "judge", "engine_type": "scripted", "model_path": "/head/judge"}
    explorer: dict[str, Any] = {
        "rollout_model": {"engine_type": "scripted", "model_path": "/head/model"}, "auxiliary_models": [judge]}
    config = Config.from_dict({"explorer": explorer, "store": {"url": made}}, folder=tmp_path)
    write(tmp_path / "log.sqlite", [(ev.SystemConfigured.stream, [ev.SystemConfigured(config=config.masked())])])
    return made


@pytest.mark.parametrize("override", [
    "explorer.auxiliary_models=[]", "explorer.auxiliary_models=null",
    "explorer.auxiliary_models=[{name: judge, engine_type: scripted, engine_num: 0}]",
])
def test_a_host_without_a_model_that_tasks_ask_is_refused_with_the_way_out(
    url: str, tmp_path: Path, override: str
) -> None:
    with pytest.raises(ConfigError, match=r"no engine of judge, but .*engine_type http"):
        host_config(url, "b", [override], tmp_path / "logs")


def test_models_lie_on_a_host_where_they_were_pulled_to(url: str, tmp_path: Path) -> None:
    as_it_is = host_config(url, "b", [], tmp_path / "logs")
    assert as_it_is.explorer.rollout_model.model_path == "/head/model"
    folders = {"/head/model": "/here/one", "/head/judge": "/here/two"}
    config = host_config(url, "b", [], tmp_path / "logs", model_folders=folders)
    assert config.explorer.rollout_model.model_path == "/here/one"
    assert [m.model_path for m in config.explorer.auxiliary_models] == ["/here/two"]
