"""Stand-in for the Hugging Face hub with movable branches, for `huggingface_hub` 1.31 to 2.4 and `datasets`
5.2.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Repository:
    """Repository. `commits`: files by path of each; `branches`: commit of each; `asked`: requests, as `GET /path`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[str] = []
        self.gated = False

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit of these files, point a branch to it, and return its hash."""
        content = repr((self.name, sorted(files.items()), len(self.commits)))
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def push_rows(self, branch: str = "main", **splits: list[dict[str, Any]]) -> str:
        """Make a commit with a JSONL file for each split."""
        files = {f"{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
                 for split, rows in splits.items()}
        return self.push(files | {"README.md": b"---\nlicense: mit\n---\n"}, branch)


class Hub:
    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}

    def repository(self, name: str) -> Repository:
        """Make a dataset repository `owner/name`."""
        return self.repositories.setdefault(name, Repository(name))


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    server.daemon_threads = True  # clients keep connections open
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, body: bytes = b"") -> None:
        path = urlsplit(self.path).path
        named = re.fullmatch(r"(/api)?/datasets/([^/]+/[^/]+)(?:/(.*))?", path)
        repository = self.hub.repositories.get(named[2]) if named else None
        if named is None or repository is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        repository.asked.append(f"{self.command} {self.path}")
        what, _, rest = (named[3] or "").partition("/")
        revision, _, file = rest.partition("/")
        revision = unquote(revision or "main")
        commit = repository.branches.get(revision, revision)
        if repository.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif commit not in repository.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif named[1]:
            self._told(repository, what, commit, body)
        else:
            self._file(repository.commits[commit].get(unquote(file)), commit)

    def _file(self, data: bytes | None, commit: str) -> None:
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"})

    def _told(self, repository: Repository, what: str, commit: str, body: bytes) -> None:
        files = repository.commits[commit]
        entries = {name: {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                   for name, data in files.items()}
        if what in ("", "revision"):
            siblings = [{"rfilename": name} for name in files]
            self._json({"_id": "1", "id": repository.name, "sha": commit, "siblings": siblings, "private": False,
                        "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []})
        elif what == "tree":
            self._json(list(entries.values()))
        elif what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            self._json([entries[name] for name in wanted if name in entries])
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
