"""The dashboard as an ASGI app: its pages, static files, `/live` and `/metrics`.

Pages are computed and rendered in a few threads, so that the event loop reads no database. If the log can't be read
(gone, locked, damaged, too new), the page says so, and the next request may work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trinity_es.dashboard import pages
from trinity_es.dashboard.access import AccessMiddleware
from trinity_es.dashboard.live import Tail, messages
from trinity_es.dashboard.page_urls import Attachment, Page, PageRequest, Route
from trinity_es.dashboard.rendering import HERE, render
from trinity_es.events import errors
from trinity_es.events.store.database.urls import masked
from trinity_es.safe_text import plain
from trinity_es.telemetry.prometheus import CONTENT_TYPE, prometheus_text

__all__ = ["create_app"]

THREADS = 4

_log = logging.getLogger(__name__)


def create_app(
    url: str, *, token: str | None = None, hosts: Iterable[str] = (), cookie: str = "trinity_es",
    is_closing: Callable[[], bool] = lambda: False, other: str | None = None,
) -> Any:
    """Return the ASGI app for the log at `url`.

    `hosts`: names that the Host header may have in addition to this machine's. `other`: URL of a second log to compare
    batches with. The event streams to pages end when `is_closing` returns True.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.staticfiles import StaticFiles

    tail = Tail(url)
    second_tail = None if other is None else Tail(other)  # not started, as its log is opened when a page reads it
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="page")
    nav = pages.navigation()
    server_values: dict[str, Any] = {}

    def response(answer: tuple[int, str] | Attachment) -> Response:
        """Return the response for a page (status, HTML), or for a file to download."""
        if isinstance(answer, Attachment):
            name = re.sub(r"[^A-Za-z0-9._-]", "-", answer.name)[:100]
            headers = {"content-disposition": f'attachment; filename="{name}"'}
            text = answer.text.encode("utf-8", "replace")
            return Response(text, media_type="text/plain; charset=utf-8", headers=headers)
        status, page_html = answer
        return Response(page_html, status_code=status, media_type="text/html; charset=utf-8")

    def render_page(page: Page, page_request: PageRequest | None, status: int = 200) -> tuple[int, str]:
        """Return the status and the HTML of a page.

        `page_request` is None for an error page, which shows the log's last position that the tail has read.
        """
        # Not above the tail's position: `/live` would take the page for one of another log.
        position = tail.position if page_request is None else min(page_request.position, tail.position)
        values = {
            "page": page, "nav": nav, "request": page_request, "position": position, "generation": tail.generation,
            "notice": tail.notice, "shown_url": masked(url),
        }
        return status, render(page.template, {**values, **page.values})

    def make_page(route: Route, path: str, query: dict[str, str]) -> tuple[int, str] | Attachment:
        """Compute a page (status, HTML) or a file, in a thread. Errors become pages."""
        try:
            log = tail.log()
            page_request = PageRequest(
                log=log, path=path, query=query, position=log.head().position, now=time.time(),
                server_values=server_values, open_other_log=None if second_tail is None else second_tail.log,
            )
            page = route.make(page_request)
            return page if isinstance(page, Attachment) else render_page(page, page_request)
        except (errors.BatchNotFound, errors.RunnerNotFound, errors.PayloadNotFound, errors.WeightNotFound) as e:
            return trouble_page(404, "Not found", e.message)
        except errors.LogNotFound as e:
            return trouble_page(503, "No log yet", f"{e.message}. This page appears when the log exists.")
        except errors.TrinityError as e:
            return trouble_page(503 if isinstance(e, errors.LogError) else 400, "This can't be shown now", e.message)
        except Exception as e:
            _log.exception("%s could not be shown", path)
            return trouble_page(500, "This page failed", f"{type(e).__name__}: {e}")

    def trouble_page(status: int, title: str, text: str) -> tuple[int, str]:
        page = Page(template="trouble.html", title=title, values={"status": status, "text": plain(text, 2000)})
        return render_page(page, None, status)

    def handler(route: Route) -> Any:
        async def handle(request: Request) -> Response:
            make = partial(make_page, route, request.url.path, dict(request.query_params))
            return response(await asyncio.get_running_loop().run_in_executor(threads, make))

        return handle

    async def live(request: Request) -> Response:
        """Answer an open page with a stream of server-sent events."""
        last_known = request.headers.get("last-event-id") or request.query_params.get("after", "")
        is_position = last_known.isdecimal() and last_known.isascii() and len(last_known) < 20
        after = int(last_known) if is_position else tail.position
        stream = messages(tail, after, request.query_params.get("log", tail.generation), is_ending=is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    def make_metrics() -> tuple[int, bytes]:
        """Compute the status and the text of /metrics, in a thread."""
        try:
            return 200, prometheus_text(tail.log())
        except errors.TrinityError as e:
            return 503, plain(e.message, 2000).encode()
        except Exception as e:
            _log.exception("/metrics could not be made")
            return 500, type(e).__name__.encode()

    async def metrics(request: Request) -> Response:
        status, text = await asyncio.get_running_loop().run_in_executor(threads, make_metrics)
        return Response(text, status_code=status, media_type=CONTENT_TYPE)

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return response(trouble_page(status, "Not found", f"there is no page {request.url.path}"))

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await tail.start()
        try:
            yield
        finally:
            await tail.stop()
            if second_tail is not None:
                await second_tail.stop()
            threads.shutdown(wait=False, cancel_futures=True)

    app = Starlette(lifespan=lifespan)
    app.add_exception_handler(HTTPException, not_found)
    for route in pages.routes():
        app.add_route(route.path, handler(route), methods=["GET"])
    app.add_route("/live", live, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_middleware(AccessMiddleware, token=token, hosts=list(hosts), cookie=cookie)
    return app
