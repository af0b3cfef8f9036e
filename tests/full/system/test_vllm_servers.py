"""A real `vllm serve` that somebody else runs, as an engine: the acceptance, and whether its logprobs are right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engines import largest_difference
from tests.helpers.of_the_day import REAL, by_turns, of_the_day
from tests.helpers.real_engine import TOLERANCE
from tests.helpers.servers import (
    EXTENSION,
    ServerProcess,
    ended,
    letters,
    over_http,
    real_server,
    runs_by,
    stand_in,
)
from tests.helpers.systems import StartSystem, play_batch
from tests.helpers.vllm_stand_in import FIRST, LAST
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.testing import wait_until

pytestmark = [
    by_turns("servers", REAL), pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore"),
]


def tokens_by(client: RolloutClient, batch: int | str) -> Counter[str]:
    made_by: dict[tuple[int | str, int], str] = {
        (e.event.task, r.run): e.event.runner for e in client.log.events(batch_id=batch)
        if isinstance(e.event, ev.RunsFinished) for r in e.event.runs
    }
    found = Counter[str]()
    for e in client.experiences(batch):
        found[made_by[e.eid.task, e.eid.run]] += e.tokens.size - e.prompt_length
    return found


def written_by(weights: Path, e: Experience) -> bool:
    """Whether a stand-in with these weights would have given this answer; the runs of a task are asked for together."""
    prompt = [int(t) for t in e.tokens[: e.prompt_length]]
    ids = [int(t) for t in e.tokens[e.prompt_length :]]
    task, run = int(e.eid.task), e.eid.run
    return ids in [
        [random.Random(f"{prompt}/{at}/{n}/{weights}/{seed!r}").randint(FIRST, LAST) for at in range(len(ids))]
        for seed, n in ((task + run, 0), (task, run))
    ]


@pytest.fixture(scope="module")
def real(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose answers say which weights made which token. A system that meets it loads its own weights."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = real_server(tiny, log, "--enable-scale-out", "--worker-extension-cls", EXTENSION).start()
    with ended(server):
        yield server.ready(240)


@pytest.fixture
def unlabelled(tiny: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    server = real_server(tiny, tmp_path / "log", "--no-enable-scale-out", "--worker-extension-cls", EXTENSION).start()
    with ended(server):
        yield server.ready(240)


def test_i3_four_servers_share_the_work_and_three_troubles_in_one_batch_lose_nothing(
    start_system: StartSystem, real: ServerProcess, tiny: Path, other: Path, tmp_path: Path
) -> None:
    speed = ("--token-seconds", "0.005")  # about the real one's on a quiet machine: each has work while it is killed
    first, second, third, late = (stand_in(tiny, tmp_path / f"stand-in-{n}.log", *speed) for n in range(4))
    with ended(first, second, third, late):
        for server in (first, second, third):
            server.start().ready()
        urls = [real.url, first.url, second.url, third.url]
        client = start_system(explorer=over_http(tiny, urls=urls) | {"max_concurrency": 8})
        client.submit_batch(batch_id=1, tasks=letters(32), batch_type="train")  # what is compiled on first use
        client.finalize_train_batch(1, timeout=120)

        play_batch(client, 2, letters(200), timeout=200)
        shares = tokens_by(client, 2)
        assert sum(shares.values()) == 200 * 2 * 8
        assert set(shares) == {f"runner-{n}" for n in range(4)}
        of_stand_ins = [shares[f"runner-{n}"] for n in (1, 2, 3)]
        assert min(of_stand_ins) >= sum(of_stand_ins) / 10, shares  # they are alike

        client.sync_weights(1, other)
        long = letters(200)
        for task in long:  # so that those who come take part
            task.rollout_args["max_tokens"] = 24
        client.submit_batch(batch_id=3, tasks=long, batch_type="train")
        wait_until(lambda: sum(runs_by(client, 3).values()) > 100, "some to be finished")
        first.kill()
        late.start()
        client.scale_servers(add=[late.url])
        second.kill()
        second.start()  # with the weights that it was started with
        assert client.finalize_train_batch(3, timeout=300)["finished_task_count"] == 200
        experiences = list(client.experiences(3))
        assert len({(e.eid.task, e.eid.run) for e in experiences}) == len(experiences) == 400, "lost, or twice"
        assert sum(runs_by(client, 3).values()) == 400
        assert {tuple(map(tuple, e.info["version_spans"])) for e in experiences} == {((1, 0, 24),)}
        made_by: dict[tuple[int | str, int], str] = {
            (e.event.task, r.run): e.event.runner for e in client.log.events(batch_id=3)
            if isinstance(e.event, ev.RunsFinished) for r in e.event.runs
        }
        for e in experiences:
            if made_by[e.eid.task, e.eid.run] == "runner-0":
                continue
            assert written_by(other, e)
            assert not written_by(tiny, e)

        def ready() -> set[str]:
            return {r["runner"] for r in client.status()["runners"] if r["state"] == "ready"}

        wait_until(lambda: {"runner-2", "runner-4"} <= ready(), "who came, and who came back", 120)
        play_batch(client, 4, letters(200), timeout=200)
        assert {"runner-0", "runner-2", "runner-3", "runner-4"} == set(runs_by(client, 4))


@pytest.mark.parametrize("server", of_the_day(["real", "unlabelled"]))
def test_logprobs_of_a_real_server_agree_with_torch_before_and_after_a_sync(
    start_system: StartSystem, tiny: Path, tmp_path: Path, server: str, request: pytest.FixtureRequest
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    client = start_system(explorer=over_http(tiny, urls=[request.getfixturevalue(server).url]))
    trainer = GRPOTrainer(str(tiny))

    def play(batch: int) -> list[Experience]:
        play_batch(client, batch, letters(16), timeout=120)
        return list(client.experiences(batch))

    before = play(1)
    assert largest_difference(trainer, before) < TOLERANCE
    rng = np.random.default_rng(0)
    for e in before:
        e.advantages = np.full(e.tokens.size - e.prompt_length, rng.normal(), dtype=np.float32)
    trainer.step(ExperienceColumns.of(before))
    trainer.save(str(tmp_path / "v1"))
    client.sync_weights(1, tmp_path / "v1")
    after = play(2)
    assert {tuple(map(tuple, e.info["version_spans"])) for e in after} == {((1, 0, 8),)}
    assert largest_difference(trainer, after) < TOLERANCE
    assert largest_difference(trainer, before) > 10 * TOLERANCE
