"""events.errors: an error is the same error in every process."""

from __future__ import annotations

import builtins
import pickle
import re

import orjson
import pytest

import trinity_es
from trinity_es.events import errors
from trinity_es.events.errors import TrinityError, error_from_dict, error_to_dict

CLASSES = [
    cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type) and issubclass(cls, TrinityError)
]
DETAILS = {"batch_id": "3/é", "rows": [1, None], "more": {"a": 1.5}}


def test_all_names_every_error_class_of_the_module() -> None:
    defined = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TrinityError)}
    assert set(CLASSES) == defined
    assert sorted(errors.__all__, key=lambda n: (n[0].islower(), n)) == errors.__all__


def test_users_find_each_of_them_in_one_place() -> None:
    assert trinity_es.errors.__all__ == [cls.__name__ for cls in CLASSES]
    assert [getattr(trinity_es.errors, cls.__name__) for cls in CLASSES] == CLASSES


def test_the_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__
    drawn = re.findall(r"^(.*?)[├└]── (.*)$", errors.__doc__.split("```")[1], re.MULTILINE)
    assert drawn
    found = {TrinityError}
    for indent, line in drawn:
        names, _, caption = line.partition("  ")
        base = errors.LogError if indent else TrinityError
        builtin = getattr(builtins, m[1]) if (m := re.search(r"\((\w+Error)\)", caption)) else Exception
        for name, inner in re.findall(r"(\w+)(?: \((\w+)\))?", names):
            cls = getattr(errors, name)
            assert base in cls.__bases__
            assert issubclass(cls, builtin), f"{name} is no {builtin.__name__}"
            found.add(cls)
            if inner:
                assert cls in getattr(errors, inner).__bases__
                found.add(getattr(errors, inner))
    assert found == set(CLASSES)
    assert issubclass(errors.PayloadNotFound, KeyError)
    assert issubclass(errors.LogNotFound, FileNotFoundError)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_says_what_it_is_for_and_is_the_same_after_pickling_and_as_json(cls: type[TrinityError]) -> None:
    assert cls.__doc__
    assert cls.__doc__.strip().endswith(".")
    given = cls("batch 3 'is' gone", **DETAILS)
    for error in (pickle.loads(pickle.dumps(given)), error_from_dict(orjson.loads(orjson.dumps(error_to_dict(given))))):
        assert type(error) is cls
        assert (str(error), error.message, error.details) == ("batch 3 'is' gone", "batch 3 'is' gone", DETAILS)


@pytest.mark.parametrize("error", [KeyError("k"), ValueError("v"), TimeoutError("t"), TypeError("y")], ids=repr)
def test_a_builtin_comes_back_as_itself(error: Exception) -> None:
    back = error_from_dict(error_to_dict(error))
    assert type(back) is type(error)
    assert str(error) in (str(back), back.args[0])


def test_a_class_that_this_process_does_not_know_keeps_its_name_and_details() -> None:
    back = error_from_dict({"type": "TheirError", "message": "no", "details": {"a": 1}})
    assert type(back) is TrinityError
    assert (str(back), back.details) == ("TheirError: no", {"a": 1})
    assert type(error_from_dict({"type": "DataError", "message": "no"})) is errors.DataError
