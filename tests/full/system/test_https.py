"""HTTP in TLS: the proxy of `serve` and the dashboard with a certificate, engines behind a private CA."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.certificates import Authority
from tests.helpers.paths import ROOT
from tests.helpers.servers import ended, letters, over_http, stand_in
from tests.helpers.serving import HELLO, serving
from tests.helpers.systems import StartSystem, play_batch, scripted
from trinity_es.dashboard.server import Dashboard
from trinity_es.events.errors import ConfigError, StartupError
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_the_proxy_speaks_https_by_its_config(start_system: StartSystem, authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("127.0.0.1")
    tls = {"cert": str(files.cert), "key": str(files.key)}
    client = start_system(mode="serve", explorer={"proxy_tls": tls})
    with serving(client.config) as proxy:
        assert proxy.base_url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=authority.ca)) as asking:
            model = openai.OpenAI(base_url=proxy.base_url, api_key=proxy.api_key, http_client=asking, max_retries=0)
            said = model.chat.completions.create(model="rollout", messages=HELLO, max_tokens=8)
            assert said.choices[0].message.content
            streamed = list(model.chat.completions.create(model="rollout", messages=HELLO, max_tokens=8, stream=True))
            assert len(streamed) > 1
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(proxy.base_url + "/models", timeout=20)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(proxy.base_url.replace("https", "http") + "/models", timeout=20)


def test_a_certificate_that_can_t_be_used_is_named(authority: Authority, tmp_path: Path, hand: str) -> None:
    files = authority.issue("127.0.0.1")
    with pytest.raises(ConfigError, match=r"explorer.proxy_tls has only cert: give the files"):
        scripted(tmp_path, mode="serve", explorer={"proxy_tls": {"cert": str(files.cert)}})
    missing = {"cert": str(files.cert), "key": str(tmp_path / "nowhere")}
    config = scripted(tmp_path, mode="serve", explorer={"proxy_tls": missing})
    with pytest.raises(ConfigError, match=r"explorer.proxy_tls.key: .*nowhere can't be read"):
        config.check()
    with pytest.raises(ConfigError, match="needs its private key"):
        Dashboard(hand, cert=str(files.cert))
    other = Authority(tmp_path, "other").issue("127.0.0.1")
    with pytest.raises(StartupError, match=r"can't be used \(KEY_VALUES_MISMATCH\)"):
        Dashboard(hand, cert=str(files.cert), key=str(other.key))


def test_the_dashboard_speaks_https_with_a_certificate(authority: Authority, hand: str) -> None:
    files = authority.issue("127.0.0.1", "localhost")
    command = [sys.executable, "-m", "trinity_es", "dashboard", "--log", hand, "--json", "--token", "a-long-token",
               "--cert", str(files.cert), "--key", str(files.key)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        assert told["url"].startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=authority.ca), timeout=20) as browser:
            entered = browser.get(told["entrance"])
            assert entered.status_code == 303
            assert "secure" in entered.headers["set-cookie"].lower()
            assert browser.get(told["url"]).status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@pytest.mark.parametrize("believed", [True, False])
def test_engines_behind_a_private_ca_are_asked_by_ssl_cert_file(
    start_system: StartSystem, authority: Authority, tiny: Path, tmp_path: Path, believed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = authority.issue("127.0.0.1")
    server = stand_in(tiny, tmp_path / "server.log", "--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key))
    server.url = server.url.replace("http:", "https:")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    with ended(server.start()):
        server.ready()
        if believed:
            client = start_system(explorer=over_http(tiny, urls=[server.url]))
            play_batch(client, 1, letters(4))
            return
        monkeypatch.setenv("SSL_CERT_FILE", str(Authority(tmp_path, "other").ca))
        client = start_system(explorer=over_http(tiny, urls=[server.url]), wait=False)
        wait_until(lambda: "certificate" in client.status()["servers"][0]["waits_for"], "it to say so", 60)
