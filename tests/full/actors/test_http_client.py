"""The client for engines' servers: a server that saw nothing of a request is told from one that may have."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.request import proxy_bypass_environment

import httpx
import pytest

from tests.helpers.endpoint import until
from tests.helpers.servers import free_port
from trinity_es.actors.engines.http.client import MAX_BYTES, http_client, size_limit
from trinity_es.actors.server_addresses import no_proxy_variables
from trinity_es.events.errors import EngineError

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n"


@contextlib.asynccontextmanager
async def server(answer: Callable[[bytes, Reader, Writer], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve, and let `answer` do what it likes with each request after its head; yield the URL."""

    async def met(reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await answer(head, reader, writer)
        writer.close()

    serving = await asyncio.start_server(met, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    finally:
        serving.close()


async def body_of(head: bytes, reader: Reader) -> bytes:
    [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return await reader.readexactly(length)


async def test_nobody_at_the_port_is_a_connect_error() -> None:
    async with http_client(connect=5) as http:
        with pytest.raises(httpx.ConnectError, match=r"127\.0\.0\.1"):
            await http.post(f"http://127.0.0.1:{free_port()}/x", json={})


async def test_a_port_that_takes_nobody_is_a_connect_timeout() -> None:
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            s = waiting.enter_context(socket.socket())
            s.setblocking(False)
            s.connect_ex(full.getsockname())
        async with http_client(connect=0.5) as http:
            with pytest.raises(httpx.ConnectTimeout):
                await http.post("http://{}:{}/x".format(*full.getsockname()), json={})


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", OK % (10, b"") + b"half", b"nonsense\r\n\r\n"])
async def test_a_server_that_goes_during_a_request_may_have_seen_it(said: bytes) -> None:
    async def gone(head: bytes, reader: Reader, writer: Writer) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    async with server(gone) as url, http_client(connect=5) as http:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await http.post(f"{url}/x", json={})


async def test_a_connection_that_was_kept_and_is_gone_is_no_connect_error_either() -> None:
    asked = 0

    async def once(head: bytes, reader: Reader, writer: Writer) -> None:
        nonlocal asked
        asked += 1
        await body_of(head, reader)
        if asked == 1:
            writer.write(OK % (0, b""))
        else:
            writer.transport.abort()

    async with server(once) as url, http_client(connect=5) as http:
        assert (await http.post(f"{url}/x", json={})).status_code == 200
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await http.post(f"{url}/x", json={})
        assert asked == 2, "what a server may have done is not asked for again"


async def test_a_server_that_says_nothing_is_a_read_timeout() -> None:
    async def silent(head: bytes, reader: Reader, writer: Writer) -> None:
        await reader.read()

    async def stops(head: bytes, reader: Reader, writer: Writer) -> None:
        writer.write(OK % (10, b"") + b"half")
        await reader.read()

    async with http_client(connect=5, read=0.2) as http:
        for way in (silent, stops):
            async with server(way) as url:
                with pytest.raises(httpx.ReadTimeout):
                    await http.get(f"{url}/x")


async def test_answers_are_what_the_server_said() -> None:
    bodies: list[bytes] = []

    async def answers(head: bytes, reader: Reader, writer: Writer) -> None:
        bodies.append(await body_of(head, reader))
        if b"/moved" in head:
            writer.write(b"HTTP/1.1 307 x\r\nlocation: /plain\r\ncontent-length: 0\r\n\r\n")
        else:
            assert b"accept-encoding: identity\r\n" in head.lower()
            writer.write(OK % (5, b"content-encoding: Identity\r\nx-said: 1\r\nx-said: 2\r\n") + b"hello")

    large = b"x" * (3 * 2**20)
    async with server(answers) as url, http_client(connect=5, headers={"authorization": "Bearer a"}) as http:
        assert (await http.post(f"{url}/moved", content=large)).status_code == 307
        answer = await http.post(f"{url}/plain", content=b"small")
        assert answer.text == "hello"
        assert answer.headers.get_list("x-said") == ["1", "2"]
    assert bodies == [large, b"small"]


async def test_an_answer_without_end_and_one_that_is_compressed_are_refused_and_their_connections_closed() -> None:
    ended = 0

    async def wrong(head: bytes, reader: Reader, writer: Writer) -> None:
        nonlocal ended
        if b"/packed" in head:
            packed = gzip.compress(b"hello")
            writer.write(OK % (len(packed), b"content-encoding: gzip\r\n") + packed)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            ended += 1

    async with server(wrong) as url, http_client(connect=5) as http:
        with pytest.raises(EngineError, match=rf"{url}/packed answers in the encoding 'gzip', .*: switch"):
            await http.get(f"{url}/packed")
        with pytest.raises(EngineError, match=rf"{url}/x answers with more than {MAX_BYTES:,} bytes"):
            await http.get(f"{url}/x?key=secret")
        with pytest.raises(EngineError, match=r"more than 100,000 bytes"):
            await http.get(f"{url}/x", extensions=size_limit(100_000))
        await until(lambda: ended == 2, "both connections to be closed")


async def test_a_stream_arrives_as_it_is_sent_and_one_that_is_left_is_closed() -> None:
    ended = asyncio.Event()

    async def drips(head: bytes, reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert await reader.read() == b""
        ended.set()

    async with server(drips) as url, http_client(connect=5) as http:
        async with http.stream("GET", f"{url}/x") as answer:
            async for part in answer.aiter_raw():
                assert part == b"first"
                break
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_cancelled_request_closes_its_connection() -> None:
    met, ended = asyncio.Event(), asyncio.Event()

    async def waits(head: bytes, reader: Reader, writer: Writer) -> None:
        met.set()
        assert await reader.read() == b""
        ended.set()

    async with server(waits) as url, http_client(connect=5) as http:
        asking = asyncio.create_task(http.get(f"{url}/x"))
        await asyncio.wait_for(met.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(ended.wait(), 5)


async def test_hundreds_are_asked_at_once() -> None:
    there, all_there = 0, asyncio.Event()

    async def together(head: bytes, reader: Reader, writer: Writer) -> None:
        nonlocal there
        there += 1
        if there == 300:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 20)
        writer.write(OK % (0, b""))

    async with server(together) as url, http_client(connect=20) as http:
        answers = await asyncio.gather(*(http.get(f"{url}/x") for _ in range(300)))
    assert {a.status_code for a in answers} == {200}


@pytest.mark.parametrize(("given", "upper", "lower"), [
    ({}, "127.0.0.1,localhost,10.0.0.1", "127.0.0.1,localhost,10.0.0.1"),
    ({"NO_PROXY": "a, .b"}, "a,.b,127.0.0.1,localhost,10.0.0.1", "a,.b,127.0.0.1,localhost,10.0.0.1"),
    ({"NO_PROXY": "a", "no_proxy": "localhost"}, "a,127.0.0.1,localhost,10.0.0.1", "localhost,127.0.0.1,10.0.0.1"),
    ({"no_proxy": "*"}, "*", "*"),
])
def test_what_goes_past_a_proxy_is_added_to_in_both_spellings(given: dict[str, str], upper: str, lower: str) -> None:
    found = no_proxy_variables(given, "10.0.0.1")
    assert found == {"NO_PROXY": upper, "no_proxy": lower}
    assert no_proxy_variables({**given, **found}, "10.0.0.1") == found
    for value in found.values():
        assert proxy_bypass_environment("10.0.0.1:80", {"no": value})


async def test_the_environment_s_proxy_is_used_and_no_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def proxy(head: bytes, reader: Reader, writer: Writer) -> None:
        heads.append(head)
        writer.write(OK % (0, b""))

    (tmp_path / "netrc").write_text("default login me password secret\n")
    for name in ("http_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with server(proxy) as url:
        for name, value in (("http_proxy", url), ("http_proxy", url.removeprefix("http://")), ("all_proxy", url)):
            monkeypatch.setenv(name, value)
            async with http_client(connect=5, trust_env=True) as http:
                assert (await http.get("http://engine.invalid/x")).status_code == 200
            monkeypatch.delenv(name)
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://u:p@"))
        async with http_client(connect=5, trust_env=True) as http:
            assert (await http.get("http://engine.invalid/x")).status_code == 200
        monkeypatch.setenv("no_proxy", "engine.invalid")
        async with http_client(connect=5, trust_env=True) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("http://engine.invalid/x")
            for here in ("127.0.0.1", "127.0.1.1", "localhost", "[::1]"):  # no proxy leads to this machine
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"http://{here}:{free_port()}/x")
        async with http_client(connect=5) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("http://other.invalid/x")
    assert all(head.startswith(b"GET http://engine.invalid/x ") for head in heads)
    assert [b"proxy-authorization: basic dtpw" in head.lower() for head in heads] == [False, False, False, True]
    assert not any(b"\r\nauthorization" in head.lower() for head in heads)
