"""The dashboard in a real Chromium: from the overview to a rollout and back, by clicks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sample_log import make
from tests.helpers.browser import Browser, live, serving

pytestmark = pytest.mark.browser


@pytest.fixture
def sample(tmp_path: Path) -> str:
    """A run that ended, with everything that happens in one."""
    path = str(tmp_path / "log.sqlite")
    make(path, batches=12, tasks=12, payloads=False)
    return path


def test_a_run_that_ended_from_overview_to_batch_to_rollout_and_back_by_clicks(browser: Browser, sample: str) -> None:
    with serving(sample, token=None) as dashboard:
        browser.open(f"{dashboard.url}/batches")
        assert "a token is needed" in browser.text("h1"), "another user of this machine"
        browser.open(dashboard.entrance)
        live(browser)
        assert browser.path == "/", "the address bar has no token"
        assert browser.text("#steps-trained") == "12"
        assert len(browser.all(".chart canvas")) == 4, "a chart each of reward, evals, throughput, staleness"
        browser.click("nav a[data-go=b]")
        browser.wait(lambda: browser.path == "/batches", "the list of batches")
        assert len(browser.all("tbody tr")) == 14
        browser.click('tbody a[href="/batch?id=3"]')
        browser.wait(lambda: browser.path == "/batch?id=3", "batch 3")
        assert len(browser.all("#tasks tbody tr")) == 12
        assert len(browser.all("#tasks .lane rect")) >= 12, "a bar an attempt"
        browser.click("#tasks tbody tr:nth-child(2) td.id a")
        browser.wait(lambda: browser.path.startswith("/rollout?id=3&task=1"), "the rollout of task 1")
        browser.driver.back()
        browser.wait(lambda: browser.path == "/batch?id=3", "batch 3 again")
        browser.click("a[data-up]")
        browser.wait(lambda: browser.path == "/batches", "the list of batches again")
