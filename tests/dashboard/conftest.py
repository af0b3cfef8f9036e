"""Dashboards in this process, and one Chromium for the whole session."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.handmade import history, write
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.server import Dashboard
from trinity_es.testing import wait_until

__all__ = ["Browser", "serving"]


@contextmanager
def serving(url: str, **options: Any) -> Iterator[Dashboard]:
    """A dashboard that answers, in a thread."""
    dashboard = Dashboard(url, **options)
    ready = threading.Event()
    thread = threading.Thread(target=dashboard.run, args=(ready.set,), name="dashboard")
    thread.start()
    try:
        assert ready.wait(30), "the dashboard did not start within 30 s"
        yield dashboard
    finally:
        dashboard.stop()
        thread.join(15)
        assert not thread.is_alive(), "the dashboard did not end within 15 s"


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


class Browser:
    """A Chromium, with the few things that these tests do in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def text(self, css: str) -> str:
        """The text of the first such element; "" where there is none (it may be replaced while one looks)."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.driver.execute_script(script, css))

    def click(self, css: str) -> None:
        """Click the first such element that is there, when it is there."""
        self.wait(lambda: self.all(css), f"something like {css}")
        self.driver.find_element("css selector", css).click()

    def press(self, *keys: str) -> None:
        """Keys, one after the other, as typed anywhere on the page."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    @property
    def path(self) -> str:
        """Path and query of the page that is shown."""
        return str(self.driver.execute_script("return location.pathname + location.search"))

    def wait(self, reached: Callable[[], Any], what: str, seconds: float = 15.0) -> None:
        from selenium.common.exceptions import StaleElementReferenceException

        def tried() -> bool:
            try:
                return bool(reached())
            except StaleElementReferenceException:  # replaced by its next version meanwhile
                return False

        wait_until(tried, what=f"{what} (at {self.path})", timeout=seconds)

    def complaints(self) -> list[str]:
        """What the browser's console says is wrong: a script that failed, something that the CSP refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


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
