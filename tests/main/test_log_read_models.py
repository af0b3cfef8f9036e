"""The log's contract, on both databases: read models move with the events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, text

from tests.helpers.logs import write_steps as write
from tests.helpers.projectors import Counts, counts
from trinity_es.events.errors import LogNotFound, LogTooNew
from trinity_es.events.store.log import EventLog, Recorded

Open = Callable[..., EventLog]


class TestReadModels:
    def test_a_new_log_is_never_seen_without_its_tables(self, store_url: str) -> None:
        """An explorer makes the log while the trainer looks for it."""
        seen = []

        class Looking(Counts):
            def create(self, connection: Connection) -> None:
                try:
                    EventLog.open(store_url, read_only=True).close()
                    seen.append("a log")
                except LogNotFound:
                    seen.append("none yet")
                super().create(connection)

        EventLog.open(store_url, create=True, projectors=[Looking()]).close()
        assert seen == ["none yet"]
        EventLog.open(store_url, create=True, projectors=[Looking()]).close()
        assert seen == ["none yet", "a log"]

    def test_move_in_the_transaction_of_the_append_and_once_for_a_repeated_commit(self, open_log: Open) -> None:
        log = open_log(projectors=[Counts()])
        for _ in range(2):
            write(log, "a", 0, 1, 2, commit="c")
        write(log, "b", 0, 1)
        assert counts(log) == {"a": 2, "b": 1}

    def test_what_a_projector_raises_undoes_the_append(self, open_log: Open) -> None:
        def refuse(recorded: list[Recorded]) -> None:
            if recorded[0].stream == "bad":
                raise ZeroDivisionError("the projector's own")

        log = open_log(projectors=[Counts(before=refuse)])  # type: ignore[arg-type]  # a list will do
        write(log, "a", 0, 1)
        with pytest.raises(ZeroDivisionError):
            write(log, "bad", 0, 1)
        assert counts(log) == {"a": 1}
        assert log.streams() == [("a", 1)]
        write(log, "a", 1, 2)
        assert log.verify() == []

    def test_a_new_one_is_built_from_the_log_when_it_is_opened(self, open_log: Open) -> None:
        write(open_log(), "a", 0, 1, 2)
        assert counts(open_log(projectors=[Counts()])) == {"a": 2}

    def test_one_that_another_writer_left_behind_catches_up(self, open_log: Open) -> None:
        with_it, without = open_log(projectors=[Counts()]), open_log()
        write(with_it, "a", 0, 1)
        write(without, "a", 1, 2, 3)
        write(with_it, "b", 0, 1)
        assert counts(with_it) == {"a": 3, "b": 1}

    def test_one_of_a_new_version_is_built_again_and_an_old_software_does_not_touch_it(self, open_log: Open) -> None:
        old = open_log(projectors=[Counts()])
        write(old, "a", 0, 1, 2)
        with old.engine.begin() as connection:
            connection.execute(text("UPDATE counts SET n = 77"))
        assert counts(open_log(projectors=[Counts(version=2)])) == {"a": 2}
        with pytest.raises(LogTooNew, match="counts"):
            write(old, "a", 2, 3)
        assert old.head().position == 2

    def test_rebuild_makes_it_again_from_the_whole_log(self, open_log: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trinity_es.events.store.log.PAGE", 2)
        log, told = open_log(projectors=[Counts()]), []
        write(log, "a", 0, 1, 2, 3)
        write(log, "b", 0, 1, 2)
        with log.engine.begin() as connection:
            connection.execute(text("UPDATE counts SET n = 77"))
        assert log.rebuild(lambda done, total: told.append((done, total))) == 5
        assert counts(log) == {"a": 3, "b": 2}
        assert told[-1] == (5, 5)

    def test_a_rebuild_that_fails_leaves_it_as_it_was(self, open_log: Open) -> None:
        failing = [False]

        def fail(_recorded: object) -> None:
            if failing[0]:
                raise ZeroDivisionError

        log = open_log(projectors=[Counts(before=fail)])
        write(log, "a", 0, 1)
        failing[0] = True
        with pytest.raises(ZeroDivisionError):
            log.rebuild()
        assert counts(log) == {"a": 1}
