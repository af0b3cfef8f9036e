"""What can be read on the network between hosts: nothing; of what goes to the database no secret."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.capture import captured
from tests.helpers.certificates import Authority
from tests.helpers.hosts import KEY, head_of, host_joins, ready
from tests.helpers.namespaces import Network, lacks, made_network, made_postgres
from tests.helpers.postgres_tls import in_tls
from tests.helpers.servers import free_port
from trinity_es import Task
from trinity_es.actors.system_key import engine_token
from trinity_es.testing import SleepWorkflow

pytestmark = [
    pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.skipif(bool(lacks()), reason=lacks())
]
PROMPT = "what is asked is nobody else's affair"


@pytest.fixture
def network() -> Iterator[Network]:
    with made_network() as made:
        yield made


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain database", "database in TLS"])
def test_no_secret_is_on_the_wire(
    network: Network, encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key, no password of the database, no key of some service in the config; between hosts no prompt."""
    password, service = secrets.token_hex(16), f"sk-{secrets.token_hex(16)}"
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    monkeypatch.setenv("SERVICE_API_KEY", service)
    authority, port = Authority(tmp_path), free_port()
    with ExitStack() as stack:
        database = stack.enter_context(made_postgres(network.head, free_port(), network.all, password))
        url, database_port = database.url, database.port
        if encrypted:
            files = authority.issue(network.head)
            database_port = stack.enter_context(in_tls(files, network.head, (network.head, database.port)))
            url = url.replace(f":{database.port}/run", f":{database_port}/run?sslmode=verify-full&sslrootcert="
                              f"{authority.ca}")
        trainer = {"args": {"api_key": "${oc.env:SERVICE_API_KEY}"}}
        wire = stack.enter_context(captured(network.all))
        hosts = {"address": f"{network.head}:{port}"}
        head = stack.enter_context(head_of(url, tmp_path, hosts, port=port, trainer=trainer))
        assert head.client.config.trainer.args["api_key"] == service
        with host_joins(url, "b", tmp_path, "--set", "trainer.args.api_key=${oc.env:SERVICE_API_KEY}",
                        inside=network.add("b")):
            ready(head.client, "b")
            tasks = [Task(workflow=SleepWorkflow, workflow_args={"seconds": 0.2}, raw_task={"prompt": f"{PROMPT} {n}"})
                     for n in range(32)]
            head.client.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
            head.finish(1, 32)
            assert head.ran_on(1)["b"] > 0
    between, stored = wire.streams(port), wire.streams(database_port)
    assert min(len(between), len(stored)) > 1000
    seen = wire.streams(0)
    for secret in (KEY, password, service, engine_token(KEY.encode())):
        assert secret.encode() not in seen
    assert PROMPT.encode() not in between
    assert (b"SystemConfigured" in stored) is not encrypted
