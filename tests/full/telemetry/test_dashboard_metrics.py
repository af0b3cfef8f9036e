"""`/metrics` of the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.helpers.handmade import history, write
from trinity_es.dashboard.app import create_app
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.telemetry.prometheus import CONTENT_TYPE, prometheus_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "log.db", history("0" * 64))
    return tmp_path / "log.db"


def test_the_dashboard_serves_the_metrics_of_its_log(path: Path) -> None:
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        answer = client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    with open_log(str(path)) as log:
        expected = prometheus_text(log).splitlines()
    assert answer.content.splitlines()[:-1] == expected[:-1]  # the last line is the age


def test_prometheus_brings_the_token_where_one_is_asked_for(path: Path) -> None:
    with TestClient(create_app(str(path), token="long enough"), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer long enough"}).status_code == 200


def test_a_log_that_is_not_there_is_503(tmp_path: Path) -> None:
    with TestClient(create_app(str(tmp_path / "none.db")), base_url="http://localhost") as client:
        answer = client.get("/metrics")
    assert answer.status_code == 503
    assert "no log at" in answer.text
