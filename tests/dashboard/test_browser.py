"""The dashboard in a real Chromium (D1)."""

from __future__ import annotations

import pytest

from tests.dashboard.conftest import Browser, serving

pytestmark = pytest.mark.browser


def test_a_page_opens_without_a_complaint_of_the_browser(browser: Browser, hand: str) -> None:
    with serving(hand) as dashboard:
        browser.open(dashboard.url)
        browser.wait(lambda: browser.all(".dot.on"), "the page to hear of the log")
        assert browser.complaints() == []
