"""Dashboards in this process, and one Chromium for the whole session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.helpers.browser import Browser
from tests.helpers.handmade import history, write
from trinity_es.dashboard.app import create_app


@pytest.fixture
def hand(tmp_path: Path) -> str:
    """A log written by hand: batch 3 (a failure, then fine), "0/letters" (an eval), "open" and 4 (aborted)."""
    path = tmp_path / "log.sqlite"
    write(path, history("0" * 64))
    return str(path)


@pytest.fixture
def client(hand: str) -> Iterator[TestClient]:
    """A client of a dashboard of that log."""
    with TestClient(create_app(hand), base_url="http://localhost") as made:
        yield made


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium is not None
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--window-size=1280,900", f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_page_load_timeout(30)
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture
def browser(_chromium: Any) -> Iterator[Browser]:
    """The browser, on an empty page, without what an earlier test left in it. For tests marked `browser`."""
    _chromium.get("about:blank")
    _chromium.delete_all_cookies()
    found = Browser(_chromium)
    found.complaints()
    yield found
    _chromium.get("about:blank")  # nothing asks a server that ends
