"""The dashboard of a run over several hosts: each host, and its lives, where runners and attempts are shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.helpers.several_hosts import BROKE, write_several_hosts
from trinity_es.dashboard.app import create_app


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    log = write_several_hosts(tmp_path_factory.mktemp("hosts") / "log.sqlite")
    with TestClient(create_app(log), base_url="http://localhost") as made:
        yield made


def cells(page: str, key: str) -> list[str]:
    """The cells of the row with this key, as text, without drawings."""
    row = re.search(rf'<tr[^>]*data-key="{re.escape(key)}".*?</tr>', page, re.S)
    assert row, key
    found = re.findall(r"<t[dh].*?</t[dh]>", re.sub(r"<svg.*?</svg>", "", row[0], flags=re.S), re.S)
    return [" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in found]


def test_the_runners_page_has_each_host_with_its_lives_and_its_runners(several: TestClient) -> None:
    page = several.get("/runners").text
    of = {host: cells(page, f"h{host}") for host in ("", "b", "c", "d")}
    assert [of[h][1] for h in of] == ["gone", "joined", "left", "draining"]
    assert [of[h][5] for h in of] == ["1 of 1", "1 of 1", "", "1 of 1"]
    assert [of[h][6] for h in of] == ["2", "1", "4", "1"]
    assert [of[h][7] for h in of] == ["", "1", "0", "0"]
    assert of["d"][8] == "its disk is replaced"
    assert (of["b"][0], of["b"][3], of["b"][4]) == ("b #2", "10.0.0.2", "2 gpus, 16 cores")
    order = re.findall(r'data-key="([gn][^"]*)"', page)
    assert order == ["g", "nrunner-0", "gb", "nrunner-0@b", "nrunner-1@b", "gc", "nrunner-0@c", "gd", "nrunner-0@d"]
    assert cells(page, "nrunner-1@b")[5] == "1 + 1 with host"
    for title in (f"epoch 1 is lost: {BROKE}", "epoch 2: joined", "epoch 1 drains: SIGTERM"):
        assert f"<title>{title}</title>" in page


def test_sorted_runners_stay_with_their_hosts(several: TestClient) -> None:
    order = re.findall(r'data-key="([gn][^"]*)"', several.get("/runners?sort=deaths&order=down").text)
    assert order[2:5] == ["gb", "nrunner-1@b", "nrunner-0@b"]


def test_a_batch_has_its_attempts_by_host(several: TestClient) -> None:
    page = several.get("/batch?id=1").text
    rows = re.findall(r'<tr class="group"><th>(.*?)</th><th class="r">(\d+)</th><th class="r">(\d+)</th>', page)
    assert rows == [("the head", "2", "0"), ("host b", "5", "3"), ("host c", "4", "0"), ("host d", "2", "0")]


def test_the_overview_counts_hosts_that_take_part(several: TestClient) -> None:
    page = several.get("/").text
    figure = re.search(r'<dd id="hosts-there">(.*?)</dd>', page, re.S)
    assert figure
    assert " ".join(re.sub(r"<[^>]+>", " ", figure[1]).split()) == "3 · 1 draining · 1 left"
    assert "2 with their host" in page


def test_a_run_on_one_host_has_none_of_it(client: TestClient) -> None:
    for path in ("/", "/runners", "/batch?id=3"):
        page = client.get(path).text
        assert 'id="hosts' not in page
        assert 'class="group"' not in page
        assert "with host" not in page


def test_a_host_s_words_are_never_markup(tmp_path: Path) -> None:
    from tests.helpers.handmade import write
    from trinity_es.events import vocabulary as ev

    evil = "<script>alert(1)</script>"
    joined = ev.HostJoined(host=evil, epoch=1, life="x", address=evil, pid=1, places={evil: 3})
    write(tmp_path / "log.sqlite", [
        ("hosts", [joined, ev.HostLost(host=evil, epoch=1, reason=evil)]),
        (f"runner/r@{evil}", [ev.RunnerStarted(runner=f"r@{evil}", incarnation=1, pid=1, host="h", engine="e")]),
    ])
    with TestClient(create_app(str(tmp_path / "log.sqlite")), base_url="http://localhost") as made:
        for path in ("/", "/runners"):
            assert "<script>alert" not in made.get(path).text
