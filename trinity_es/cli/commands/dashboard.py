"""The command `dashboard`."""

from __future__ import annotations

import socket
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli import common
from trinity_es.dashboard.live import open_log
from trinity_es.dashboard.server import Dashboard
from trinity_es.events.errors import LogNotFound
from trinity_es.telemetry.opentelemetry import start_traces

__all__ = ["dashboard"]


def dashboard(
    log: common.LogOption = None,
    config: common.ConfigOption = None,
    address: Annotated[str, typer.Option("--address", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="TRINITY_ES_TOKEN", show_envvar=True,
                     help="Token that browsers need. Default: a new one, in the printed address."),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Let every user of this machine in.")] = False,
    host: Annotated[list[str] | None, typer.Option(
        "--host", metavar="NAME", help="Another name under which browsers reach this machine; repeat.")] = None,
    other: Annotated[str | None, typer.Option(
        "--other", metavar="URL_OR_PATH", help="A second log, to compare batches with.")] = None,
    cert: Annotated[str, typer.Option("--cert", metavar="FILE", help="Certificate (PEM); turns HTTPS on.")] = "",
    key: Annotated[str, typer.Option("--key", metavar="FILE", help="The certificate's private key (PEM).")] = "",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Show the log of a live or an old run in a browser. The dashboard never writes to the log.

    It works offline. If the log does not exist yet, the pages appear when it does. The printed address contains the
    token; a browser that has opened this address once has access from then on.

    \b
    Examples:
      trinity-es dashboard --open
      trinity-es dashboard --log runs/letters/first/log.sqlite --port 8050
      trinity-es dashboard --address 0.0.0.0 --cert host.pem --key host.key
      trinity-es dashboard --log runs/a/log.sqlite --other runs/b/log.sqlite
    """
    url = common.choose_log(log, config)
    try:
        open_log(url).close()
    except LogNotFound as e:
        common.note(f"{e.message}; waiting for it")

    server = Dashboard(url, address=address, port=port, token=token, no_token=no_token, hosts=host or [], other=other,
                       cert=cert, key=key)
    redirect_file: Path | None = None

    def announce() -> None:
        nonlocal redirect_file
        if as_json:
            common.print_json({"url": server.url, "token": server.token, "entrance": server.entrance})
        else:
            print(f"dashboard at {server.entrance}")
            if address in ("0.0.0.0", "::"):
                print(f"from elsewhere {server.entrance_at(socket.gethostname())}")
            print("end with Ctrl-C")
        sys.stdout.flush()
        if open_browser:
            redirect_file = _open_in_browser(server.entrance)

    traces = start_traces(url, None if config is None else common.read_config(config).monitor.otlp_endpoint)
    try:
        server.run(announce)
    finally:
        if redirect_file is not None:
            redirect_file.unlink(missing_ok=True)
        if traces is not None:
            traces.close()


def _open_in_browser(address: str) -> Path:
    """Open an address in a browser through an HTML file that redirects to it, and return the file.

    So the token is not in the browser's arguments, which every user can see. Only this user can read the file.
    """
    import webbrowser

    with tempfile.NamedTemporaryFile("w", prefix="trinity-es-dashboard-", suffix=".html", delete=False) as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}">\n')
    webbrowser.open(Path(file.name).as_uri())
    return Path(file.name)
