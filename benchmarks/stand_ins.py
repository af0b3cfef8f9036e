"""Many servers in one process that imitate vLLM's API, as cheap third-party engines."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.servers import ServerProcess, ended
from tests.helpers.servers import stand_in as one_stand_in
from trinity_es.testing import wait_until


@contextmanager
def stand_ins(folder: Path, model: str, count: int) -> Iterator[list[str]]:
    """Run `count` servers for this block. Yields their URLs."""
    file = folder / "urls"
    more = ["--servers", str(count), "--urls", str(file)]
    server: ServerProcess = one_stand_in(Path(model), folder / "servers.log", *more)
    with ended(server):
        server.start()
        wait_until(lambda: file.exists() and file.read_text().count("\n") == count, "the servers", 30)
        urls = file.read_text().split()
        with urllib.request.urlopen(f"{urls[-1]}/health", timeout=10):
            pass
        yield urls
