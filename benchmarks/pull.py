"""How fast does a host pull weights from the head, compared with a copy of the same files over a plain socket?

Two processes of this machine, over loopback, from shared memory into shared memory. "plain": one process reads the
files and writes them to a socket, the other writes from the socket to a file. "first" and "next" are a host's pulls
over TLS, of files that the head has not hashed yet and has hashed; the host hashes every file. Each round measures all
of them in turn.

`python -m benchmarks.pull [--json FILE] [--gib 1.0] [--rounds 5]`
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.child_processes import piped
from benchmarks.compared import options_of, write_json
from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.certificate import Certificate
from trinity_es.actors.hosts.folder_files import FolderName
from trinity_es.actors.hosts.folder_puller import FolderPuller
from trinity_es.actors.hosts.head_client import HeadDialer, HeadPlace
from trinity_es.actors.hosts.link import HeadEnd

KEY = b"k" * 40
FILES = 4


def serve_folder(folder: str, pipe: Connection) -> None:
    """Serve a folder to hosts, and its files, one after the other, over a plain socket."""
    def hello(said: Mapping[str, Any], where: str, answer: Callable[[Admission], None]) -> None:
        answer(Admission(folder=folder))

    def none(*args: Any) -> None:
        pass

    certificate = Certificate.create()
    end = HeadEnd(("127.0.0.1", 0), lambda: KEY, certificate, 30.0, hello=hello, take=none, gone=none)
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((HeadPlace(f"127.0.0.1:{end.start().result(10)}", certificate.digest), plain.getsockname()[1]))
    while True:
        to, _ = plain.accept()
        with to:
            for path in sorted(Path(folder).iterdir()):
                with path.open("rb") as file:
                    while data := file.read(2**20):
                        to.sendall(data)


def cat(port: int, into: Path) -> None:
    with socket.create_connection(("127.0.0.1", port)) as from_head, (into / "all").open("wb") as file:
        while data := from_head.recv(2**20):
            file.write(data)


def pull(place: HeadPlace, into: Path) -> None:
    puller = FolderPuller(into, HeadDialer("b", lambda: KEY, lambda: place, 30.0))
    asyncio.run(puller.pull(FolderName("weights", version=1), None, lambda text: None))


def measure(folder: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Return {way to copy: MB/s of each round}."""
    rates: dict[str, list[float]] = {"plain": [], "first": [], "next": []}
    with piped(serve_folder, str(folder), patience=0.0) as (pipe, _):
        place, plain = pipe.recv()
        for _ in range(rounds):
            for file in folder.iterdir():
                os.utime(file)  # it looks new, so the head hashes it again
            ways: dict[str, Callable[[Path], None]] = {
                "plain": partial(cat, plain), "first": partial(pull, place), "next": partial(pull, place)}
            for way, work in ways.items():
                with tempfile.TemporaryDirectory(dir="/dev/shm") as into:
                    began = time.monotonic()
                    work(Path(into))
                    rates[way].append(size / 1e6 / (time.monotonic() - began))
    return rates


def main() -> None:
    args = options_of(__doc__, quick=False, gib=1.0, rounds=5)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        each = int(args.gib * 2**30 / FILES)
        for n in range(FILES):
            Path(folder, f"{n}.safetensors").write_bytes(os.urandom(each))
        found = measure(Path(folder), FILES * each, args.rounds)
    told = {way: round(statistics.median(rates)) for way, rates in found.items()}
    for way, rates in found.items():
        print(f"{way:>6}: {told[way]:>6} MB/s ({min(rates):.0f} - {max(rates):.0f})")
    write_json(args.json, {"median_mb_per_second": told, "rounds": found})


if __name__ == "__main__":
    main()
