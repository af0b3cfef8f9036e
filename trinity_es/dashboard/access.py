"""Access control of the dashboard, as an ASGI middleware around the app.

- The Host header must be an IP address, localhost, this machine's name, or a name from `--host`. Otherwise another
  website could resolve its own name to this server and read the pages (DNS rebinding).
- If a token is set, each request needs it as `Authorization: Bearer` or as a cookie. A request with `?token=` sets the
  cookie and is redirected to the URL without the token, so that no address bar or Referer has the token.
- Only GET and HEAD are allowed, and POST of the token to `/enter`.
- Response headers forbid inline scripts and styles, other origins, frames, sniffing, the Referer and caching.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

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
WEEK_SECONDS = 7 * 86400


class AccessMiddleware:
    """ASGI app that passes allowed requests to `app` and adds HEADERS to every response."""

    def __init__(self, app: Any, *, token: str | None, hosts: Iterable[str] = (), cookie: str = "trinity_es") -> None:
        self.app = app
        self.token = token
        self.cookie_name = cookie
        own_name = socket.gethostname().lower()
        self.host_names = {"localhost", own_name, own_name.partition(".")[0], *(h.lower().rstrip(".") for h in hosts)}
        # Value of the cookie: derived from the token, so that the cookie does not hold the token itself.
        self.ticket = "" if token is None else hmac.digest(token.encode(), b"trinity-es dashboard", "sha256").hex()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            """Send a message of the response. Adds to its start all HEADERS that the app did not set."""
            if message["type"] == "http.response.start":
                present_names = {name.lower() for name, _ in message["headers"]}
                caching = "no-cache" if scope["path"].startswith("/static/") else "no-store"
                added = {**HEADERS, "cache-control": caching}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in added.items() if k.encode() not in present_names),
                ]
            await send(message)

        access_answer = await self._access_answer(scope, receive)
        await (access_answer or self.app)(scope, receive, send_with_headers)

    async def _access_answer(self, scope: Any, receive: Any) -> Any:
        """Return the response to a request that is refused or logs in; None for a request that the app may answer."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_own_host(headers.get(b"host", "")):
            return _page(421, "this server has another name",
                         "The Host header names another machine. Start the dashboard with --host NAME to allow another "
                         "name of this machine.")
        if scope["path"] == "/enter" and scope["method"] == "POST" and self.token is not None:
            return await self._enter(receive, secure=scope["scheme"] == "https")
        if scope["method"] not in ("GET", "HEAD"):
            return _page(405, "nothing can be changed here", "The dashboard is read-only.")
        if self.token is None or scope["path"].startswith("/static/"):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens:
            if not self._is_token(tokens[0]):
                return _token_form("That token is wrong.")
            other_parameters = urlencode([(n, v) for n, v in query if n != "token"])
            path = "/" + quote(scope["path"].lstrip("/\\"))  # one slash: `//elsewhere` would be another server
            url = path + (f"?{other_parameters}" if other_parameters else "")
            return self._log_in(url, secure=scope["scheme"] == "https")
        bearer = headers.get(b"authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or hmac.compare_digest(self._cookie_ticket(headers.get(b"cookie", "")), self.ticket):
            return None
        return _token_form("")

    def _is_own_host(self, host: str) -> bool:
        """Return True if the Host header may have this value: a name or an IP address, perhaps with a port."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.host_names
        return True  # DNS rebinding needs a name

    def _is_token(self, text: str) -> bool:
        """Return True if this is the token. The comparison takes constant time."""
        return hmac.compare_digest(text.encode(errors="replace"), (self.token or "").encode())

    def _cookie_ticket(self, header: str) -> str:
        """Return the value of the dashboard's cookie in a Cookie header; "" if there is none."""
        from starlette.requests import cookie_parser

        ticket = cookie_parser(header).get(self.cookie_name, "")  # SimpleCookie stops at a malformed cookie
        return ticket if ticket.isascii() else ""

    async def _enter(self, receive: Any, *, secure: bool) -> Any:
        """Return the response to a posted token: a redirect that sets the cookie, or the form again."""
        body = b""
        while len(body) < 4096:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        token = dict(parse_qsl(body.decode("latin-1"))).get("token", "")
        return self._log_in("/", secure=secure) if self._is_token(token) else _token_form("That token is wrong.")

    def _log_in(self, url: str, *, secure: bool) -> Any:
        from starlette.responses import RedirectResponse

        answer = RedirectResponse(url, status_code=303)
        answer.set_cookie(
            self.cookie_name, self.ticket, max_age=WEEK_SECONDS, httponly=True, secure=secure, samesite="lax", path="/")
        return answer


def _page(status: int, title: str, text: str, *, form: bool = False) -> Any:
    """Return a response with a page without navigation; with `form`, it has a form for the token."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(render("plain.html", {"title": title, "text": text, "form": form}), status_code=status)


def _token_form(text: str) -> Any:
    """Return the page that asks for the token. `text`: why the last token was refused."""
    return _page(401, "a token is needed", text or "The command that started the dashboard printed it.", form=True)
