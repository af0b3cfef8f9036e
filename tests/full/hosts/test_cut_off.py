"""A host that is cut off in the middle of what it says to PostgreSQL keeps nobody else from the log."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.namespaces import lacks, made_network, made_postgres
from tests.helpers.paths import ROOT
from tests.helpers.servers import free_port
from trinity_es.events.store.log import EventLog
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120), pytest.mark.skipif(bool(lacks()), reason=lacks())]

HOLDS = """
import os, sys, time
from trinity_es.events.store.database.database import Database

with Database(sys.argv[1]).engine.connect() as connection:
    connection.exec_driver_sql("SELECT * FROM es_log_head FOR UPDATE")
    handle = connection.connection.dbapi_connection.fileno()
    os.write(handle, b"P" + (1000).to_bytes(4, "big") + b"half of a message")
    print("holds", flush=True)
    time.sleep(600)
"""


def test_a_lock_of_a_host_that_was_cut_off_in_the_middle_of_a_message_is_let_go() -> None:
    with made_network() as network, made_postgres(network.head, free_port(), network.all) as database:
        EventLog.open(database.url, create=True).close()
        held = subprocess.Popen([*network.add("x"), sys.executable, "-c", HOLDS, database.url], cwd=ROOT,
                                stdout=subprocess.PIPE, text=True)
        try:
            assert held.stdout.readline() == "holds\n"
            network.away("x")
            with EventLog.open(database.url) as log:
                wait_until(lambda: log.acquire_lease("coordinator", {}) is not None, "the lease of another host", 40)
        finally:
            held.kill()
            held.wait()
            held.stdout.close()
