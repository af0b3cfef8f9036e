"""The short form of `make chaos`: random faults on real processes, and nothing is lost, repeated or doubled (B1)."""

from __future__ import annotations

import pytest

from benchmarks.chaos import chaos, report


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_b1_random_faults_lose_repeat_and_double_nothing(backend: str) -> None:
    account = chaos(backend, kills=5, seconds=40.0, seed=3, batches=3, tasks=20)
    assert account.kills >= 3, report(account)
    assert account.tasks >= 60, report(account)
    assert account.clean, report(account)
