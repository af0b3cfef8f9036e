"""A log full of HTML, scripts, terminal escapes and bidirectional tricks adds no element to any page or export."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from benchmarks.sample_log import make
from benchmarks.sample_run import HOSTILE
from tests.helpers.browser import Browser, serving
from tests.helpers.handmade import write
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.batch_export import batch_page
from trinity_es.dashboard.page_urls import batch_url, rollout_url, runner_url
from trinity_es.dashboard.rendering import HERE
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import batch_stream
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors

OURS = {
    "html", "head", "meta", "title", "link", "script", "style", "body", "header", "nav", "main", "section", "div", "p",
    "h1", "h2", "h3", "a", "span", "i", "b", "em", "strong", "small", "code", "pre", "kbd", "time", "br",
    "dl", "dt", "dd", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "form", "label", "input", "select",
    "option", "datalist",
    "button", "output", "noscript", "dialog", "details", "summary", "svg", "use", "g", "rect", "line", "path",
    "circle", "polyline", "text", "canvas",
}
ADDRESSES = {"href", "src", "action", "hx-get", "xlink:href", "data-href"}
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NAME = "\"><img src=x onerror=\"document.title='owned'\">/../?#%3Cb%3E&amp;'"
EACH = 2
"""Pages of one kind that are read."""


class Page(HTMLParser):
    """What is wrong with a page, and where it leads."""

    def __init__(self, text: str, *, offline: bool = False) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.links: list[str] = []
        self.offline = offline
        self.inside = ""
        self.feed(text)
        self.close()
        if ACTS.search(text):
            self.wrong.append(f"holds {ACTS.search(text)}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in OURS:
            self.wrong.append(f"<{tag} {given}>")
        for name, value in attrs:
            if name.startswith("on") or name in ("style", "srcdoc", "formaction", "ping"):
                self.wrong.append(f"<{tag} {name}={value!r}>")
            if name in ADDRESSES and not self.good(tag, value or ""):
                self.wrong.append(f"<{tag} {name}={value!r}>")
        if tag == "script" and (self.offline or ("src" not in given and given.get("type") != "application/json")):
            self.wrong.append(f"<script {given}>")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")

    def good(self, tag: str, address: str) -> bool:
        if self.offline:
            return False
        if tag in ("script", "link", "use"):
            return address.startswith("/static/")
        return bool(re.match(r"(/(?!/)|#|\?|$)", address)) and "\\" not in urlsplit(address).path

    def handle_decl(self, decl: str) -> None:
        if decl.lower() != "doctype html":
            self.wrong.append(f"<!{decl}>")

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"<!--{data}-->")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("hostile") / "log.sqlite")
    make(path, batches=11, tasks=10, runs=2, seed=5, hostile=True)
    with EventLog.open(path, projectors=projectors()) as log:  # a runner and a batch that are called so
        life = {"runner": NAME, "incarnation": 99}
        events: list[tuple[str, list[ev.Event]]] = [
            (f"runner/{NAME}", [ev.RunnerStarted(**life, pid=1, host=NAME, engine=NAME, model=NAME),
                                ev.RunnerReady(**life, places=1, model_version=1, load_seconds=1)]),
            (batch_stream(NAME), [
                ev.BatchSubmitted(batch_id=NAME, batch_type="train", repeat_times=[2], tasks=[{"workflow": NAME}]),
                ev.TasksDispatched(**life, model_version=1,
                                   units=[ev.Unit(task=0, run_id_base=0, runs=2, attempt=1)])]),
        ]
        for stream, some in events:
            log.append([Write(stream=stream, expected_version=0, events=some)], commit_id=f"more {stream}"[:80])
    return path


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[TestClient]:
    with TestClient(create_app(url), base_url="http://localhost") as made:
        yield made


def test_the_parser_finds_what_it_is_there_for() -> None:
    found = [Page(text).wrong for text in HOSTILE]
    assert all(found[i] for i in (0, 1, 2, 3, 5, 9))
    assert Page('<a href="javascript:alert(1)">x</a>').wrong
    assert Page('<a href="//elsewhere/">x</a>').wrong
    assert Page("<p>fine</p>").wrong == []


def test_no_template_says_safe_and_all_are_escaped() -> None:
    for template in (HERE / "templates").iterdir():
        text = template.read_text()
        assert not re.search(r"\|\s*safe\b|autoescape|Markup", text), template.name


def test_every_page_that_links_lead_to_is_ours_alone(client: TestClient) -> None:
    # Where the overview leads is the newest; these are a megabyte, a batch with an odd name and a runner with one.
    first = ["/", "/rollout?id=1&task=1&run=0", batch_url(NAME), rollout_url(NAME, 0, 0), runner_url(NAME),
             "/batch/asof?id=3&n=3", "/batch/steps?id=3"]
    todo, known, kinds, wrong, read = deque(first), set(first), Counter[str](), {}, Counter[str]()
    while todo:
        path = todo.popleft()
        answer = client.get(path)
        assert answer.status_code == 200, path
        read[urlsplit(path).path] += 1
        if answer.headers["content-type"].startswith("text/plain"):
            assert answer.headers["content-disposition"].startswith("attachment")
            assert answer.headers["x-content-type-options"] == "nosniff"
            continue
        page = Page(answer.text)
        if page.wrong:
            wrong[path] = page.wrong[:3]
        for href in page.links:
            parts = urlsplit(href)
            kind = f"{parts.path}?{re.sub(r'=[^&]*', '', parts.query)}"
            if href.startswith("/") and href not in known and kinds[kind] < EACH:
                kinds[kind] += 1
                known.add(href)
                todo.append(href)
    assert wrong == {}
    for kind in ("/", "/batches", "/batch", "/events", "/rollouts", "/rollout", "/rollout.txt", "/runners", "/runner",
                 "/weights", "/compare"):
        assert read[kind], f"no link led to {kind}"


def test_pages_that_tell_of_trouble_are_ours_alone(client: TestClient) -> None:
    for path in ("/rollout?id=<script>alert(1)</script>", "/runner?name=<img src=x onerror=alert(1)>",
                 "/compare?id=<script>&id2=\"onmouseover=alert(1)", "/<script>", "/weights?version=<b>&page='\"><i>",
                 "/rollouts?id=1&sort=<s>&task=\"><script>", "/rollouts?outcome=<x>"):
        answer = client.get(path)
        assert answer.status_code < 500
        assert Page(answer.text).wrong == [], path


def test_a_megabyte_of_it_is_a_page_that_opens(client: TestClient) -> None:
    answer = client.get("/rollout?id=1&task=1&run=0")
    assert "more characters" in answer.text
    assert len(answer.text) < 1_000_000
    assert Page(answer.text).wrong == []


def test_the_export_is_one_file_without_script_or_address(url: str) -> None:
    with open_log(url) as log:
        for row in log.batches()[::4]:
            text = batch_page(log, row.batch_id)
            assert Page(text, offline=True).wrong == [], row.batch_id
            assert not re.search(r"url\(|@import|https?:", text.partition("<body")[0])
            assert "default-src 'none'" in text
            assert len(text) < 3_000_000


@pytest.mark.browser
def test_nothing_of_it_runs_in_a_browser(browser: Browser, url: str, tmp_path: Path) -> None:
    file = tmp_path / "batch.html"
    with open_log(url) as log:
        file.write_text(batch_page(log, 1))
    titles = (
        "return [document.title, document.querySelectorAll('img, iframe, object, [onerror], [onmouseover]').length, "
        "[...document.scripts].filter(s => !s.src && s.type !== 'application/json').length]"
    )
    with serving(url) as dashboard:
        paths = ["/", "/rollouts?id=1", *(rollout_url(1, task, 0) for task in range(len(HOSTILE))), batch_url(1),
                 "/events", runner_url(NAME), batch_url(NAME), "/weights?version=3"]
        for path in paths:
            browser.open(dashboard.url.rstrip("/") + path)
            browser.wait(lambda: browser.all(".dot.on"), f"{path} to be live")
            title, elements, scripts = browser.driver.execute_script(titles)
            assert title.endswith("trinity-es"), path
            assert (elements, scripts) == (0, 0), path
            assert browser.complaints() == [], path
        shown = browser.driver.execute_script("return document.body.innerText")
        assert "<img src=x onerror=" in shown  # it is there, as text: the weights' path
    browser.open(file.as_uri())
    assert browser.driver.execute_script(titles) == ["batch 1 · trinity-es", 0, 0]
    border = browser.driver.execute_script("return getComputedStyle(document.querySelector('.panel')).borderTopWidth")
    assert border == "1px"  # its style sheet is let in
    text = browser.driver.execute_script("return document.body.textContent")
    assert "<script>document.title='owned'</script>" in text
    assert browser.complaints() == []


def test_words_of_hosts_and_adapters_are_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    adapter = ev.AdapterPublished(adapter=evil, version=1, path=evil, rank=8, size=1, digest="d")
    refused = ev.AdapterFailed(runner=f"r@{evil}", incarnation=1, adapter=evil, version=1, error=evil)
    joined = ev.HostJoined(host=evil, epoch=1, life="x", address=evil, pid=1, places={evil: 3})
    write(tmp_path / "log.sqlite", [
        ("hosts", [joined, ev.HostLost(host=evil, epoch=1, reason=evil)]),
        (f"runner/r@{evil}", [ev.RunnerStarted(runner=f"r@{evil}", incarnation=1, pid=1, host="h", engine="e")]),
        *((event.own_stream(), [event]) for event in (adapter, refused)),
    ])
    with TestClient(create_app(str(tmp_path / "log.sqlite")), base_url="http://localhost") as made:
        for path in ("/", "/runners", "/weights"):
            assert "<script>alert" not in made.get(path).text
