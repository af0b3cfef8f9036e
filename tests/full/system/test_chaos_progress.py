"""The short form of `make chaos-progress`: a kill costs at most an interval of generated tokens (promise 12)."""

from __future__ import annotations

import pytest

from benchmarks.chaos_progress import measure, report
from benchmarks.chaos_progress_vllm import kolmogorov_smirnov


@pytest.mark.chaos
@pytest.mark.timeout(200)
def test_promise_12_kills_lose_and_bend_nothing_with_the_journal_and_both_without() -> None:
    figures = measure(quick=True, seed=0)
    assert figures.bad == [], report(figures)
    kept, begun_again = ([c for c in figures.cuts if c.journal is journal] for journal in (True, False))
    assert sum(c.ended_again for c in kept) == 0
    assert min(c.intervals for c in begun_again) > max(c.intervals for c in kept), report(figures)
    undisturbed, with_journal, without = figures.mixed
    assert with_journal.kills >= 1, report(figures)
    assert with_journal.lengths == undisturbed.lengths, report(figures)
    assert figures.bent[0].longest_lost == 0.0
    assert without.goodput < with_journal.goodput, report(figures)
    agents = figures.agents
    assert agents.all_kills == 5
    assert agents.calls >= 8 * 20, report(figures)


def test_the_two_sample_test_knows_equal_and_shifted_samples() -> None:
    assert kolmogorov_smirnov(range(100), range(100)) == (0.0, 1.0)
    distance, p = kolmogorov_smirnov(range(200), range(27, 227))
    assert distance == pytest.approx(0.135)  # 1.36 at the square root of 100, which tables give for 0.05
    assert 0.045 < p < 0.05
