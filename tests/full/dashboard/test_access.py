"""Who may read the dashboard, and what a browser may do with it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from tests.helpers.handmade import ROOT
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.server import Dashboard, token_for
from trinity_es.events.errors import ConfigError, StartupError
from trinity_es.testing import wait_until

TOKEN = "a-token-of-some-length"


@pytest.fixture
def guarded(hand: str) -> Iterator[TestClient]:
    """A dashboard that asks for a token."""
    with TestClient(create_app(hand, token=TOKEN), base_url="http://localhost", follow_redirects=False) as client:
        yield client


def test_every_answer_forbids_what_pages_do_not_need(client: TestClient) -> None:
    for path in ("/", "/batches", "/batch?id=77", "/nothing", "/static/app.css", "/batch/asof?id=3&n=1"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy, path
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == ("no-cache" if "static" in path else "no-store")


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "x@y"])
def test_a_name_that_is_not_this_machines_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "letters" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3"])
def test_this_machines_names_and_addresses_are_let_in(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


def test_a_name_that_was_given_is_let_in(hand: str) -> None:
    with TestClient(create_app(hand, hosts=["runs.example"]), base_url="http://runs.example") as client:
        assert client.get("/").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, "/batches").status_code == 405


@pytest.mark.parametrize("path", ["/", "/batches", "/events", "/batch?id=3", "/live", "/batch/steps?id=3", "/nothing"])
def test_without_the_token_there_is_nothing_to_see(guarded: TestClient, path: str) -> None:
    for wrong in ({}, {"authorization": "Bearer wrong"}, {"cookie": "trinity_es=wrong"}, {"cookie": "trinity_es"}):
        answer = guarded.get(path, headers=wrong)
        assert answer.status_code == 401
        assert "letters" not in answer.text
    assert guarded.get(path + ("&" if "?" in path else "?") + "token=wrong").status_code == 401


def test_the_token_is_taken_once_and_stays_in_no_address(guarded: TestClient) -> None:
    answer = guarded.get(f"/batch?id=3&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/batch?id=3"
    assert TOKEN not in str(answer.headers)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert guarded.get("/batch?id=3").status_code == 200, "the cookie lets it in from now on"


def test_the_token_may_be_typed_or_given_as_a_header(guarded: TestClient) -> None:
    assert guarded.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.post("/enter", data={"token": "wrong"}).status_code == 401
    assert guarded.get("/").status_code == 401
    assert guarded.post("/enter", data={"token": TOKEN}).headers["location"] == "/"
    assert guarded.get("/").status_code == 200


def test_a_redirect_stays_on_this_server(guarded: TestClient) -> None:
    answer = guarded.get(f"http://localhost//evil.example/?token={TOKEN}")
    assert answer.headers["location"].startswith("/evil.example")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_every_address_asks_for_a_token(address: str) -> None:
    """Each user of a machine reaches its loopback."""
    made = token_for(address, None)
    assert made is not None
    assert len(made) >= 32
    assert made != token_for(address, None)


def test_the_token_may_be_given_or_none_be_asked_for_on_loopback() -> None:
    assert token_for("127.0.0.1", None, no_token=True) is None
    with pytest.raises(ConfigError, match=r"--no-token needs a loopback address, but .* reach 0\.0\.0\.0"):
        token_for("0.0.0.0", None, no_token=True)
    with pytest.raises(ConfigError, match="leave one of them out"):
        token_for("127.0.0.1", TOKEN, no_token=True)
    assert token_for("127.0.0.1", TOKEN) == TOKEN
    with pytest.raises(ConfigError, match="8 or more"):
        token_for("0.0.0.0", "")


def test_a_port_that_is_taken_says_so(hand: str) -> None:
    first = Dashboard(hand)
    with pytest.raises(StartupError, match="give another --port"):
        Dashboard(hand, port=int(first.url.rpartition(":")[2]))
    first.close()


def test_the_command_on_a_network_waits_for_the_log_asks_for_a_token_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trinity_es", "dashboard", "--log", str(tmp_path / "log.sqlite"), "--json",
               "--address", "0.0.0.0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            told = json.loads("".join(process.stdout.readline() for _ in range(5)))
            assert len(told["token"]) >= 32
            with httpx.Client(follow_redirects=True, timeout=20) as client:
                assert client.get(told["url"]).status_code == 401
                answer = client.get(told["entrance"])
                assert (answer.status_code, "No log yet" in answer.text) == (503, True)
                assert told["token"] not in str(answer.url)
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "waiting for it" in said
        assert told["token"] not in said


def test_the_command_opens_a_browser_by_a_file_that_is_its_users_alone(hand: str, tmp_path: Path) -> None:
    """Every user of a machine sees the arguments of a program, and so of a browser."""
    seen = tmp_path / "seen"
    looks = (f"import os, sys; from urllib.parse import urlsplit as s; p = s(sys.argv[1]).path; "
             f"open({str(seen)!r} + '-', 'w').write(repr((sys.argv[1], oct(os.stat(p).st_mode), open(p).read()))); "
             f"os.rename({str(seen)!r} + '-', {str(seen)!r})")
    (tmp_path / "look.py").write_text(looks)
    command = [sys.executable, "-m", "trinity_es", "dashboard", "--log", hand, "--json", "--open"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={
        **os.environ, "PYTHONPATH": str(ROOT), "BROWSER": f"{sys.executable} {tmp_path / 'look.py'} %s",
    }) as process:
        try:
            told = json.loads("".join(process.stdout.readline() for _ in range(5)))
            wait_until(seen.is_file, "the browser", 20)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
    address, mode, text = ast.literal_eval(seen.read_text())
    assert address.startswith("file:///")
    assert told["token"] not in address
    assert mode == "0o100600"
    assert f'content="0; url={told["entrance"]}"' in text
    assert not Path(address.removeprefix("file://")).exists()


@pytest.mark.parametrize("other", ['prefs={"a":1}', "x=a b", "bareword", "lang=dé"])
def test_the_cookie_of_another_server_on_this_machine_locks_nobody_out(guarded: TestClient, other: str) -> None:
    mine = guarded.get(f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    guarded.cookies.clear()
    assert guarded.get("/batches").status_code == 401
    assert guarded.get("/batches", headers=[(b"cookie", f"{other}; {mine}".encode("latin-1"))]).status_code == 200
