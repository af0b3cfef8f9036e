"""The head of a run over hosts, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import KEY, Head, StartHead, head_of
from tests.helpers.servers import free_port


@pytest.fixture
def start_head(postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartHead]:
    """Start a head: `start_head(explorer={...})`. `address`: the port that hosts are told, unless it is the head's."""
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    with ExitStack() as heads:
        def start(address: int | None = None, timeout: float = 4.0, **sections: Any) -> Head:
            port = free_port()
            hosts = {"address": f"127.0.0.1:{address or port}", "listen": f"127.0.0.1:{port}", "timeout": timeout}
            return heads.enter_context(head_of(postgres(), tmp_path, hosts, port=port, **sections))

        yield start
