"""A browser, and a dashboard to open in it."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity_es.dashboard.server import Dashboard
from trinity_es.testing import wait_until


@contextmanager
def serving(url: str, **options: Any) -> Iterator[Dashboard]:
    """Run a dashboard in a thread. It requires a token only if `token` is in the options."""
    dashboard = Dashboard(url, **{"no_token": "token" not in options, **options})
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


@contextmanager
def chromium(profile: str | Path, *flags: str) -> Iterator[Any]:
    """Run Chromium for this block, with further `flags`. Yields its driver; ends this process if it is missing."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or chromedriver is None:
        sys.exit("no chromium and chromedriver here: on Debian they are the packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", *flags,
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


class Browser:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def text(self, css: str) -> str:
        """Return the text of the first such element, or "". One script, since the page may replace the element."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.driver.execute_script(script, css))

    def click(self, css: str) -> None:
        self.wait(lambda: self.all(css), f"something like {css}")
        self.driver.find_element("css selector", css).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    @property
    def path(self) -> str:
        return str(self.driver.execute_script("return location.pathname + location.search"))

    def wait(self, reached: Callable[[], Any], what: str, seconds: float = 15.0) -> None:
        from selenium.common.exceptions import StaleElementReferenceException

        def tried() -> bool:
            try:
                return bool(reached())
            except StaleElementReferenceException:  # the page replaced the element
                return False

        wait_until(tried, what=f"{what} (at {self.path})", timeout=seconds)

    def complaints(self) -> list[str]:
        """Return the errors in the browser's console, such as failed scripts and refusals by the CSP."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def live(browser: Browser) -> None:
    browser.wait(lambda: browser.all(".dot.on"), "the page to hear of the log")
