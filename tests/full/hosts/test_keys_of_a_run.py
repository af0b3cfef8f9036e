"""The key of a run over hosts: replaced while it goes on; who has another one is refused."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import KeyFile, has_settled, head_of, host_joins, log_of, ready
from tests.helpers.systems import pid_of
from trinity_es.events import vocabulary as ev
from trinity_es.hosts.join import find_head
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]


def made() -> str:
    return secrets.token_hex(32)


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_ES_KEY", raising=False)


def test_the_key_is_replaced_in_a_batch_and_nothing_is_lost(postgres: Callable[[], str], tmp_path: Path) -> None:
    """Connections that stand go on; who was forgotten is refused at its next one, and given the new key, is back."""
    url, old, new = postgres(), made(), made()
    on_head, on_b, on_c = (KeyFile(tmp_path / f"key-{where}", old) for where in ("head", "b", "c"))
    with (
        head_of(url, tmp_path, {"key_file": str(on_head.path)}) as head,
        host_joins(url, "b", tmp_path, "--key-file", str(on_b.path)) as b,
        host_joins(url, "c", tmp_path, "--key-file", str(on_c.path)),
    ):
        ready(head.client, "b")
        ready(head.client, "c")
        epoch = {h["host"]: h["epoch"] for h in head.client.status()["hosts"]}
        head.submit(1, 192, 0.5)
        wait_until(partial(has_settled, head, 8), "8 tasks", 30)
        for file in (on_b, on_head):  # in any order
            file.holds(new)
        wait_until(partial(has_settled, head, 40), "40 tasks", 30)

        def connected() -> dict[str, bool]:
            return {h["host"]: h["connected"] for h in head.client.status()["hosts"]}

        assert connected() == {"b": True, "c": True}
        before = find_head(url)
        psutil.Process(pid_of(head.client, "coordinator")).kill()
        wait_until(lambda: "calls itself 'c'" in log_of(head), "the refusal of c", 30)
        assert find_head(url).digest != before.digest, "each coordinator has a certificate of its own"
        assert "give that host the head's (hosts.key_file, or TRINITY_ES_KEY)" in log_of(head)
        wait_until(lambda: connected() == {"b": True, "c": False}, "b with the new key", 20)
        log_of_c = tmp_path / "host-c" / "host.log"
        wait_until(lambda: "the head has another key" in log_of_c.read_text(), "c to say why", 30)
        on_c.holds(new)
        wait_until(lambda: connected() == {"b": True, "c": True}, "c with the new key", 20)
        head.finish(1, 192)
        assert head.events(ev.AttemptFailed, ev.HostLost) == []
        assert {h["host"]: h["epoch"] for h in head.client.status()["hosts"]} == epoch
        assert b.process.poll() is None
        for secret in (old, new):
            assert secret not in log_of(head)
