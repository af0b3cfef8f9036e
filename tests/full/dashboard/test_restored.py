"""A log that was put back to a copy under a dashboard: no page shows what the server keeps of another history."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.handmade import copied, finished, history, put_back, unit, write
from trinity_es.dashboard import app, tokens
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.page_urls import PageRequest
from trinity_es.dashboard.pages import rollouts
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import open_log

PATHS = [
    "/", "/batches", "/batch?id=open", "/batch?id=9", "/events", "/rollouts", "/rollouts?id=open", "/rollouts?id=9",
    "/rollout?id=9&task=0&run=0", "/runners", "/runner?name=runner-0", "/weights", "/weights?version=6",
    "/compare?id=3&id2=9",
]


def went_on(path: Path, reward: float) -> None:
    """As many events of the same types in every history: they differ by values alone."""
    nine: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=9, batch_type="train", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0)], model_version=6),
        finished(0, None, reward=reward),
    ]
    state = fold(nine)
    assert state is not None
    nine.append(ev.BatchFinalized(result=batch_result(state), model_versions=[(round(reward * 100), 6)]))
    write(path, [
        ("system", [ev.SystemConfigured(config={"name": f"run {reward}"})]),
        ("weights", [ev.WeightsPublished(version=6, path=f"/ckpt/{reward}")]),
        ("runner/runner-0", [ev.WeightsLoaded(runner="runner-0", incarnation=1, version=6, seconds=reward),
                             ev.RunnerLost(runner="runner-0", incarnation=1, reason=f"as of {reward}")]),
        (batch_stream("open"), [finished(0, None, reward=reward)]),
        (batch_stream(9), nine),
    ])


def test_pages_show_the_history_that_was_put_back_and_what_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "time", SimpleNamespace(time=lambda: 2e9))  # pages tell how long ago something was
    path, copy = tmp_path / "log.sqlite", tmp_path / "copy.sqlite"
    write(path, history("0" * 64))
    copied(path, copy)

    def shown(client: TestClient) -> dict[str, str]:
        """The part of each page that is the log's."""
        answers = {asked: client.get(asked).text for asked in PATHS}
        return {a: re.sub(r"(?s).*<main|</main>.*", "", text) for a, text in answers.items()}

    def as_a_new_server_does(client: TestClient) -> dict[str, str]:
        found = shown(client)
        with TestClient(create_app(str(path)), base_url="http://localhost") as anew:
            wanted = shown(anew)
        for asked in PATHS:
            assert found[asked] == wanted[asked], f"{asked} shows what was kept"
        return found

    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        went_on(path, 0.25)
        one = as_a_new_server_does(client)
        put_back(copy, path)
        shorter = as_a_new_server_does(client)
        went_on(path, 0.5)
        two = as_a_new_server_does(client)
        put_back(copy, path)
        went_on(path, 0.75)  # nobody looked in between
        three = as_a_new_server_does(client)
    for asked in PATHS:
        assert len({pages[asked] for pages in (one, shorter, two, three)}) == 4, f"{asked} tells the histories apart"


def test_the_tokenizer_is_that_of_the_config_that_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def decoder(config: dict[str, Any]) -> tuple[None, str]:
        asked.append(config["name"])
        return None, asked[-1]

    monkeypatch.setattr(tokens, "decoder", decoder)
    path, copy = tmp_path / "log.sqlite", tmp_path / "copy.sqlite"
    write(path, history("0" * 64))
    copied(path, copy)
    for reward in (0.25, 0.5):
        put_back(copy, path)
        went_on(path, reward)
        with open_log(str(path)) as log:
            ask = PageRequest(log=log, path="/rollout", query={}, position=0, now=0.0)
            assert rollouts._decoder(ask) == rollouts._decoder(ask) == (None, f"run {reward}")
    assert asked == ["run 0.25", "run 0.5"], "loaded once for each"
