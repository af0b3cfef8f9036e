"""The key and the certificate of a run over hosts: replaced while it goes on; who has another one is refused."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.certificates import Authority
from tests.helpers.hosts import Head, KeyFile, has_settled, head_of, host_joins, log_of, ready
from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts.sealed_stream import Refused, open_to_head
from trinity_es.actors.hosts.tls import begin_at_host
from trinity_es.events import vocabulary as ev
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]


def made() -> str:
    return secrets.token_hex(32)


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_ES_KEY", raising=False)


def test_the_key_is_replaced_in_a_batch_and_nothing_is_lost(postgres: Callable[[], str], tmp_path: Path) -> None:
    """The new one beside the old on all, then the old one away; who was forgotten is refused, and given it, is back."""
    url, old, new = postgres(), made(), made()
    on_head, on_b, on_c = (KeyFile(tmp_path / f"key-{where}", old) for where in ("head", "b", "c"))
    with (
        head_of(url, tmp_path, key_file=str(on_head.path)) as head,
        host_joins(url, "b", tmp_path, "--key-file", str(on_b.path)) as b,
        host_joins(url, "c", tmp_path, "--key-file", str(on_c.path)),
    ):
        ready(head.client, "b")
        ready(head.client, "c")
        epoch = {h["host"]: h["epoch"] for h in head.client.status()["hosts"]}
        head.submit(1, 192, 0.5)
        wait_until(partial(has_settled, head, 8), "8 tasks", 30)
        for file in (on_b, on_head):  # in any order
            file.holds(new, old)
        wait_until(partial(has_settled, head, 40), "40 tasks", 30)
        assert "taken away" not in log_of(head)
        on_head.holds(new)
        on_b.holds(new)

        def connected() -> dict[str, bool]:
            return {h["host"]: h["connected"] for h in head.client.status()["hosts"]}

        wait_until(lambda: "calls itself 'c'" in log_of(head), "the refusal of c", 20)
        assert "give that host the head's (hosts.key_file, or TRINITY_ES_KEY)" in log_of(head)
        wait_until(lambda: connected() == {"b": True, "c": False}, "b with the new key", 20)
        log_of_c = tmp_path / "host-c" / "host.log"
        wait_until(lambda: "the head hung up: it has another key" in log_of_c.read_text(), "c to say why", 30)
        on_c.holds(new)
        wait_until(lambda: connected() == {"b": True, "c": True}, "c with the new key", 20)
        head.finish(1, 192)
        assert head.events(ev.AttemptFailed, ev.HostLost) == []
        assert {h["host"]: h["epoch"] for h in head.client.status()["hosts"]} == epoch
        assert b.process.poll() is None
        for secret in (old, new):
            assert secret not in log_of(head)


def says(head: Head, key: str, tls: HostsTlsConfig, **more: Any) -> None:
    """Say to the head what a host says that wants to join. Raises what it answers."""
    hello = {"name": "x", "life": "1", "pid": 7, "places": {}, **more}

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        try:
            await begin_at_host(reader, writer, tls, "127.0.0.1")
            await asyncio.wait_for(open_to_head(reader, writer, key.encode(), hello), 20)
        finally:
            writer.transport.abort()

    asyncio.run(ask())


def test_hosts_speak_tls_and_another_build_is_refused(postgres: Callable[[], str], tmp_path: Path) -> None:
    url, authority, key = postgres(), Authority(tmp_path), KeyFile(tmp_path / "key", made())
    files = authority.issue("127.0.0.1")
    tls = {"cert": str(files.cert), "key": str(files.key), "ca": str(authority.ca)}
    with (
        head_of(url, tmp_path, key_file=str(key.path), tls=tls) as head,
        host_joins(url, "b", tmp_path, "--key-file", str(key.path)),  # the CA lies where the head has it
    ):
        ready(head.client, "b")
        head.submit(1, 64, 0.1)
        head.finish(1, 64)
        assert head.ran_on(1)["b"] > 0
        with pytest.raises(Refused, match=r"0\.0\.0"):
            says(head, key.path.read_text().strip(), HostsTlsConfig(**tls), build="0.0.0")
        assert "host x is not taken in" in log_of(head)
