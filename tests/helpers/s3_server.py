"""An S3 server on loopback for tests: moto, in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BUCKET = "rollouts"


class S3Server:
    """S3 server on a fixed port that can be stopped, and started again with its objects."""

    def __init__(self) -> None:
        self._port = 0
        self.start()

    def start(self) -> None:
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        self.is_up = True
        self._port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()
        self.is_up = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def make_bucket(self, name: str = BUCKET) -> None:
        self.client().create_bucket(Bucket=name)

    def client(self):  # type: ignore[no-untyped-def]  # boto3 makes its classes when it runs
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1",
                            aws_access_key_id="tester", aws_secret_access_key="not-a-secret")


def s3_environment(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true",
    }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Yield a server with a bucket. The credentials are in this process's environment."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(server).items():
            patch.setenv(name, value)
        server.make_bucket()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def refusing_server(status: int, code: str, count: int) -> Iterator[str]:
    """Yield the address of a server that refuses `count` requests as S3 does, and accepts all others."""
    left = [count]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            refuses, left[0] = left[0] > 0, left[0] - 1
            body = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode() if refuses else b""
            self.send_response(status if refuses else 200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
