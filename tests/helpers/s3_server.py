"""An S3 server on loopback for tests: moto, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "rollouts"


class S3Server:
    """A server on a fixed port that can be stopped, and started again with what it held."""

    def __init__(self) -> None:
        self._port = 0
        self.start()

    def start(self) -> None:
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()

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
    """Give a server with a bucket, whose credentials are in this process's environment."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(server).items():
            patch.setenv(name, value)
        server.make_bucket()
        try:
            yield server
        finally:
            server.stop()
