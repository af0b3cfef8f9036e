"""A log lies where it is said to lie, whatever letters the names of its folders have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trinity_es.cli.which_config import config_of_run
from trinity_es.config.config import Config, load_config
from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.store.database.urls import file_of, file_url, masked, parse_url
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import SystemConfigured
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.why.answer import resume_command

NAMES = ["my%20project", "trial?1", "trial?lr=2&x=3", "Qwen%2FQwen2.5", "50%", "a#b", "ü ß+@:'\"", "100%25"]


@pytest.mark.parametrize("name", NAMES)
def test_the_log_of_a_config_lies_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "c.yaml").write_text("explorer: {rollout_model: {engine_type: scripted}}")
    config = load_config(folder / "c.yaml")
    file = folder / "runs/trinity/run/log.sqlite"
    shown = config.masked()["store"]["url"]
    assert [file_of(url) for url in (config.store.url, shown, masked(shown))] == [file] * 3
    assert Path(config.run_dir) == file.parent
    again = Config.from_dict({"store": {"url": config.store.url}})
    assert again.store.url == config.store.url
    assert str(file) in resume_command(shown).replace("'\"'\"'", "'")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_a_path_and_its_url_names_the_same(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    assert parse_url(str(file)).database == parse_url(file_url(file)).database == str(file)
    with pytest.raises(LogNotFound, match="no log at ") as refused:
        open_log(str(file))
    assert name in str(refused.value)


def test_the_name_of_a_database_is_shown_with_its_escapes() -> None:
    url = "postgresql+psycopg://me@/my%20run%3F?host=%2Ftmp%2Fa+b"
    assert masked(url) == url
    assert resume_command(url) == f"trinity-es resume '{url}'"


def test_another_run_is_begun_by_what_says_where_its_log_lies(tmp_path: Path) -> None:
    data = {"name": "second", "explorer": {"rollout_model": {"engine_type": "scripted"}}}
    assert "`--set name=...`" in Config.from_dict(data, folder=tmp_path).another_run
    assert "`--set name=...`" in Config.from_dict(data | {"mode": "bench"}, folder=tmp_path).another_run
    for url in ("sqlite:///log.sqlite", "postgresql://me@here/runs"):
        assert "`--set store.url=...`" in Config.from_dict(data | {"store": {"url": url}}, folder=tmp_path).another_run


def test_a_copied_log_does_not_name_the_folders_of_the_original_and_a_moved_one_does(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/c.yaml").write_text("explorer: {rollout_model: {engine_type: scripted}}")
    config = load_config(tmp_path / "run/c.yaml")
    with EventLog.open(config.store.url, create=True) as log:
        configured = SystemConfigured(config=config.masked())
        log.append([Write(stream="system", expected_version=0, events=[configured])], commit_id="c")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    file = Path("runs/trinity/run/log.sqlite")
    for name in ("run", "link"):
        assert config_of_run(str(tmp_path / name / file), None).run_dir == config.run_dir
    with pytest.raises(ConfigError, match=r"copy/.* is a copy of .*/run/runs/.* name the config file of the copy"):
        config_of_run(str(tmp_path / "copy" / file), None)
    assert config_of_run(str(tmp_path / "copy/c.yaml"), None).run_dir == str((tmp_path / "copy" / file).parent)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert config_of_run(str(tmp_path / "moved" / file), None).run_dir == config.run_dir


def test_options_of_a_file_are_refused() -> None:
    for refuse in (parse_url, lambda url: Config.from_dict({"store": {"url": url}})):
        with pytest.raises(ConfigError, match=r"trial\?1/log.sqlite.* after .*write %3F"):
            refuse("sqlite:///trial?1/log.sqlite")
