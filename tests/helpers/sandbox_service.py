"""Sandbox service that records its sandboxes.

`python -m tests.helpers.sandbox_service FILE SEED SLOW` writes its URL to FILE.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

MAKING_SECONDS = 0.0, 0.5
"""Minimum and maximum time to make a sandbox."""
SLOW_SECONDS = 4.0, 5.0
"""The same for slow sandboxes: longer than it takes until the system looks for sandboxes of a dead run."""


def serve(place: Path, seed: int, slow: float) -> None:
    """Serve until this process is killed."""
    boxes: dict[str, dict[str, Any]] = {}
    lock, chance = threading.Lock(), random.Random(seed)
    refuses = [False]

    def answer(what: str, args: dict[str, str]) -> Any:
        if what == "create":
            with lock:
                pause = chance.uniform(*(SLOW_SECONDS if chance.random() < slow else MAKING_SECONDS))
            time.sleep(pause)
            with lock:
                handle = f"box-{len(boxes)}"
                boxes[handle] = {
                    "key": args["key"], "handle": handle, "made": time.time(), "ended": None, "users": [], "renewed": 0,
                }
            return handle
        with lock:
            if what == "refuse":
                refuses[0] = args["on"] == "1"
            elif what == "release":
                if refuses[0]:
                    raise RuntimeError("the service is out of order")
                for box in boxes.values():
                    if box["key"] == args["key"] and box["ended"] is None:
                        box["ended"] = time.time()
            elif what == "renew":
                for box in boxes.values():
                    box["renewed"] += box["key"] == args["key"]
            elif what == "use":
                box = boxes[args["handle"]]
                if box["ended"] is not None:
                    raise RuntimeError(f"{args['handle']} is gone")
                if args["user"] not in box["users"]:
                    box["users"].append(args["user"])
            elif what == "boxes":
                return list(boxes.values())
        return None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            args = {k: v[0] for k, v in parse_qs(asked.query).items()}
            try:
                status, said = 200, answer(asked.path[1:], args)
            except Exception as e:
                status, said = 500, str(e)
            body = json.dumps(said).encode()
            try:
                self.send_response(status, None if status == 200 else str(said))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the client is gone

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    part = place.with_suffix(".part")
    part.write_text(f"http://127.0.0.1:{server.server_address[1]}")
    part.rename(place)
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
