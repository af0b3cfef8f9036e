"""Who gets the request: the least loaded engine, or the one that has the task already unless that is much fuller."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trinity_es.actors.engines.http.pool import REPORT_SECONDS, SLACK_REQUESTS, EnginePool
from trinity_es.testing import ManualClock

NAMES = st.sampled_from([f"judge-{n}" for n in range(6)])
LOADS = st.dictionaries(NAMES, st.integers(0, 60), max_size=6)
TASKS = st.none() | st.text(max_size=8)


def pool_of(loads: dict[str, int], clock: ManualClock | None = None) -> EnginePool:
    pool = EnginePool(clock or ManualClock())
    pool.update(
        {"runner": name, "incarnation": 0, "endpoint": f"http://{name}", "open_count": loads[name]} for name in loads
    )
    return pool


def choose(task: str | None, loads: dict[str, int], home: str | None = None) -> str | None:
    """The engine that a pool with these loads chooses for a task whose last request went to `home`."""
    pool, keys = pool_of(loads), [] if task is None else [task]
    if home is not None:
        keys = keys or [""]
        pool._runner_by_key[keys[0]] = home
    chosen = pool.choose(keys)
    return None if chosen is None else chosen.runner


@given(TASKS, LOADS, st.none() | NAMES)
def test_p15_the_least_loaded_or_a_home_with_room(task: str | None, loads: dict[str, int], home: str | None) -> None:
    chosen = choose(task, loads, home)
    if not loads:
        assert chosen is None
        return
    assert chosen is not None
    least = min(loads.values())
    if home in loads and loads[home] <= least + max(SLACK_REQUESTS, least):  # type: ignore[index]  # it is in it
        assert chosen == home
    else:
        assert loads[chosen] == least


@given(TASKS, LOADS, NAMES)
def test_p15_without_its_home_a_task_goes_as_if_it_had_none(task: str | None, loads: dict[str, int], gone: str) -> None:
    left = {name: load for name, load in loads.items() if name != gone}
    assert choose(task or "", left, gone) == choose(task or "", left, None)


@given(TASKS, LOADS, st.randoms())
def test_every_caller_chooses_the_same(task: str | None, loads: dict[str, int], chance: object) -> None:
    names = list(loads)
    chance.shuffle(names)  # type: ignore[attr-defined]  # a random.Random
    assert choose(task, {n: loads[n] for n in names}) == choose(task, loads)


@given(st.integers(1, 6))
def test_a_task_keeps_its_engine_while_requests_come_and_the_others_get_the_other_tasks(engines: int) -> None:
    """Requests that never end: all of a task on one engine, and no engine has more tasks than its share needs."""
    loads = {f"judge-{n}": 0 for n in range(engines)}
    homes: dict[str, str] = {}
    for task in range(engines * 4):
        for _ in range(SLACK_REQUESTS // 2):
            chosen = choose(str(task), loads, homes.get(str(task)))
            assert chosen is not None
            assert homes.setdefault(str(task), chosen) == chosen
            loads[chosen] += 1
    assert set(Counter(homes.values()).values()) == {4}


def test_equal_engines_share_tasks_evenly() -> None:
    shares = Counter(choose(f"1/{task}", {"judge-0": 0, "judge-1": 0}) for task in range(400))
    assert min(shares["judge-0"], shares["judge-1"]) > 150


def test_an_old_report_says_nothing() -> None:
    """Else an engine that was busy once, and is not asked since, would count as busy for ever."""
    pool = pool_of({"a": 0, "b": 1}, clock := ManualClock())
    a, b = pool.all()
    a.other_count, a.reported_at = 7, clock()
    clock.advance(REPORT_SECONDS / 2)
    assert pool.choose() is b
    clock.advance(REPORT_SECONDS / 2)
    assert pool.choose() is a
