"""The short form of `make chaos-hosts`, with what `test_namespaces.py` leaves out: another host becomes the head."""

from __future__ import annotations

import pytest

from benchmarks.chaos_hosts import chaos_hosts
from benchmarks.chaos_hosts_account import hosts_report
from tests.helpers.namespaces import lacks
from tests.helpers.of_the_day import FAULTS, by_turns

pytestmark = [
    pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.skipif(bool(lacks()), reason=lacks())
]


@by_turns("kinds at random", FAULTS)
def test_f2_faults_of_hosts_and_heads_lose_double_and_blame_nothing() -> None:
    kinds = ["host agent killed", "link of the head away", "packets lost one way"]
    account = chaos_hosts(seed=1, kinds=kinds, measured=False, hosts=2, lanes=2, tasks=60, timeout=8.0)
    assert account.faults.total() == 3, hosts_report(account)
    assert account.coordinators >= 2, hosts_report(account)
    assert account.clean, hosts_report(account)
