"""Takes of experiences whose answers were lost."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest

from trinity_es.actors.commands import TakeExperiences
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import TakeTimeout


def test_each_of_two_equal_takes_that_got_no_answer_is_asked_again_under_its_own_id() -> None:
    client: Any = RolloutClient.__new__(RolloutClient)
    client._take_lock, client._unanswered_take_ids = threading.Lock(), defaultdict(list)
    both_asked, ids = threading.Barrier(2), list[str]()

    class Silent:
        def call(self, command: Any, timeout: Any, id: str) -> list[Any]:
            ids.append(id)
            both_asked.wait(10)
            raise TimeoutError

    class Answering:
        def call(self, command: Any, timeout: Any, id: str) -> list[Any]:
            ids.append(id)
            return []

    def take() -> None:
        with pytest.raises(TakeTimeout, match="did not deliver 2 experiences"):
            client._take(TakeExperiences(n=2, timeout=0.1, step=None))

    client._link = Silent()
    other = threading.Thread(target=take)
    other.start()
    take()
    other.join(10)
    client._link = Answering()
    for _ in range(3):
        client._take(TakeExperiences(n=2, timeout=0.1, step=None))
    assert sorted(ids[:2]) == sorted(ids[2:4])
    assert ids[4] not in ids[:4]
