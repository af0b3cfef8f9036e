"""Who may read, and what a browser may do with what it gets. An ASGI middleware, around everything.

- The Host header must name this server: an IP address, localhost, this machine's name, or a name that was given. So a
  page elsewhere can't read it by pointing a name of its own here (DNS rebinding).
- Where there is a token, it must come with the request: `Authorization: Bearer`, a cookie, or once as `?token=`, which
  is answered by the cookie and a redirect to the same page without it, so that it stays in no address bar or Referer.
- Nothing can be changed here: every method but GET and HEAD is refused, but for posting the token to `/enter`.
- Headers: no inline script or style, nothing from elsewhere, no frame, no sniffing, no Referer, no cache.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, urlencode

from trinity_es.dashboard.rendering import render

__all__ = ["HEADERS", "AccessMiddleware"]

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
                               "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
WEEK = 7 * 86400


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


class AccessMiddleware:
    def __init__(self, app: Any, *, token: str | None, hosts: Iterable[str] = (), cookie: str = "trinity_es") -> None:
        self.app, self.token, self.cookie = app, token, cookie
        own = socket.gethostname().lower()
        self.hosts = {"localhost", own, own.partition(".")[0], *(h.lower().rstrip(".") for h in hosts)}
        # The cookie does not hold the token itself.
        self.ticket = "" if token is None else hmac.digest(token.encode(), b"trinity-es dashboard", "sha256").hex()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                kept = "no-cache" if scope["path"].startswith("/static/") else "no-store"
                added = {**HEADERS, "cache-control": kept}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in added.items() if k.encode() not in present),
                ]
            await send(message)

        answer = await self._refusal(scope, receive)
        await (answer or self.app)(scope, receive, with_headers)

    async def _refusal(self, scope: Any, receive: Any) -> Any:
        """Return the answer to a request that goes no further; None: let it in."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._known(_name_of(headers.get(b"host", ""))):
            return _page(421, "this server is not called that",
                         "The Host header names another machine. Start the dashboard with --host NAME for a name that "
                         "leads here.")
        if scope["path"] == "/enter" and scope["method"] == "POST" and self.token is not None:
            return await self._enter(receive, secure=scope["scheme"] == "https")
        if scope["method"] not in ("GET", "HEAD"):
            return _page(405, "nothing can be changed here", "The dashboard only reads.")
        if self.token is None or scope["path"].startswith("/static/"):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given:
            if not self._right(given[0]):
                return _login("That token is wrong.")
            rest = urlencode([(n, v) for n, v in query if n != "token"])
            return self._let_in(_local(scope["path"]) + (f"?{rest}" if rest else ""), secure=scope["scheme"] == "https")
        bearer = headers.get(b"authorization", "").removeprefix("Bearer ")
        if self._right(bearer) or hmac.compare_digest(self._ticket_of(headers.get(b"cookie", "")), self.ticket):
            return None
        return _login("")

    def _known(self, name: str) -> bool:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.hosts
        return True  # nobody can make an address lead elsewhere

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), (self.token or "").encode())

    def _ticket_of(self, header: str) -> str:
        from starlette.requests import cookie_parser

        found = cookie_parser(header).get(self.cookie, "")  # SimpleCookie gives up at another server's odd cookie
        return found if found.isascii() else ""

    async def _enter(self, receive: Any, *, secure: bool) -> Any:
        body = b""
        while len(body) < 4096:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        given = dict(parse_qsl(body.decode("latin-1"))).get("token", "")
        return self._let_in("/", secure=secure) if self._right(given) else _login("That token is wrong.")

    def _let_in(self, where: str, *, secure: bool) -> Any:
        from starlette.responses import RedirectResponse

        answer = RedirectResponse(where, status_code=303)
        answer.set_cookie(
            self.cookie, self.ticket, max_age=WEEK, httponly=True, secure=secure, samesite="lax", path="/")
        return answer


def _local(path: str) -> str:
    """Return a path that stays on this server: `//elsewhere` would not."""
    from urllib.parse import quote

    return "/" + quote(path.lstrip("/\\"))


def _page(status: int, title: str, text: str, *, form: bool = False) -> Any:
    from starlette.responses import HTMLResponse

    return HTMLResponse(render("plain.html", {"title": title, "text": text, "form": form}), status_code=status)


def _login(text: str) -> Any:
    return _page(401, "a token is needed", text or "It was printed where the dashboard was started.", form=True)
