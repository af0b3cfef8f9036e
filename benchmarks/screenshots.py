"""Screenshots of every page of the dashboard, light and dark, of a simulated run: `make screenshots`.

Writes `docs/screenshots/<page>-<light|dark>.png`, 1280 by 800. Needs chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sample_log import make
from tests.helpers.browser import chromium, serving
from trinity_es.dashboard.page_urls import batch_url, link, rollout_url, runner_url
from trinity_es.events.values import BatchId
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.testing import wait_until

SIZE = 1280, 800
BEGINS_AT = {"batch": "#tasks"}
"""{page that is scrolled before its screenshot: selector of the element to scroll to}."""


def pages(log: Log) -> dict[str, str]:
    """Return {name of a picture: path of its page}."""
    rows = log.batches(batch_type="train")
    quick = [row for row in rows if row.ended_at is not None and row.ended_at - row.submitted_at < 20]
    worst = max(quick or rows, key=lambda row: (row.failed_attempts, row.first_position)).batch_id
    before, last = rows[-2].batch_id, rows[-1].batch_id
    died = max(log.runner_lives(), key=lambda life: life.attempts_lost).runner
    version = max(log.weights(), key=lambda v: (len(v.failures), v.version)).version
    return {
        "overview": "/", "batches": "/batches", "batch": batch_url(worst), "events": "/events",
        "rollouts": link("/rollouts", id=last), "rollout": _rollout(log, last), "runners": "/runners",
        "runner": runner_url(died), "weights": "/weights", "weights-version": link("/weights", version=version),
        "compare": link("/compare", id=before, id2=last),
    }


def _rollout(log: Log, batch_id: BatchId) -> str:
    from trinity_es.projections.history.attempts import fold_timeline

    longest = max(fold_timeline(log.events(batch_id)).rows, key=lambda row: row.response_tokens)
    return rollout_url(batch_id, longest.task, longest.run)


def _size(driver: Any, height: int) -> None:
    values = {"width": SIZE[0], "height": max(SIZE[1], height), "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", values)


def pictures(url: str, folder: Path, *, whole: bool = False, only: list[str] | None = None) -> list[Path]:
    """Take screenshots of the log at `url`, and return the files. `whole`: of each page from top to bottom."""
    with open_log(url) as log:
        chosen = {name: path for name, path in pages(log).items() if not only or name in only}
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with (
        tempfile.TemporaryDirectory() as profile, serving(url) as dashboard,
        chromium(profile, "--hide-scrollbars", "--force-device-scale-factor=1") as driver,
    ):
        for theme in ("light", "dark"):
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                   {"features": [{"name": "prefers-color-scheme", "value": theme}]})
            for name, path in chosen.items():
                _size(driver, SIZE[1])
                driver.get(dashboard.url.rstrip("/") + path)
                wait_until(lambda: driver.find_elements("css selector", ".dot.on"), what=f"{path} to be live")
                if name in BEGINS_AT:
                    driver.execute_script("document.querySelector(arguments[0]).scrollIntoView(); scrollBy(0, -56)",
                                          BEGINS_AT[name])
                if whole:
                    _size(driver, driver.execute_script("return document.documentElement.scrollHeight"))
                file = folder / f"{name}-{theme}.png"
                driver.save_screenshot(str(file))
                taken.append(file)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"))
    parser.add_argument("--log", help="take them of this log, not of a run that is made up")
    parser.add_argument("--whole", action="store_true", help="each page from top to bottom")
    parser.add_argument("--only", nargs="*", help="these pages only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.log
        if url is None:
            url = str(Path(folder) / "letters" / "first.sqlite")
            Path(url).parent.mkdir()
            make(url, batches=60, tasks=24, runs=4, seed=7)
        taken = pictures(url, options.out, whole=options.whole, only=options.only)
    print(f"{len(taken)} pictures in {options.out}, {sum(f.stat().st_size for f in taken) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
