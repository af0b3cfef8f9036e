"""The turns of a run by texts and ids alone, as an HTTP endpoint has them."""

from __future__ import annotations

import pytest

from tests.helpers.sampler import Merging
from trinity_es.actors.rollout.conversation.turns import Marks, Turn, Turns

MARKS = Marks(asks="A:", closes="$\n", ends="$\n")


def of_texts(marks: Marks = MARKS) -> Turns:
    merging = Merging()
    return Turns(merging.encode, merging.decode, lambda: marks)


@pytest.fixture
def turns() -> Turns:
    return of_texts()


def said(turns: Turns, rendered: str, text: str, end: str = "$") -> Turn:
    """Have a prompt answered, a letter a token."""
    prompt = turns.prompt(rendered) or turns.encode(rendered)
    ids = [ord(c) for c in text + end]
    return turns.record(rendered, prompt, ids, None, text, previous=turns.turn_before(prompt))


def goes_on(turns: Turns, rendered: str, sampled: str, rest: str) -> None:
    assert turns.prompt(rendered) == [*turns.encode("U:a|A:"), *map(ord, sampled), *turns.encode(rest)]


def test_a_first_prompt_and_a_fork_have_no_ids_of_their_own(turns: Turns) -> None:
    assert turns.prompt("U:a|A:") is None
    said(turns, "U:a|A:", "(why)aa")
    assert turns.prompt("U:b|A:") is None
    assert turns.forks == 0
    for _ in range(2):  # asked again it is the same fork
        assert turns.prompt("U:a|A:aa$\nU:b|A:") is None
        assert turns.forks == 1
    goes_on(turns, "U:a|A:(why)aa$\nU:b|A:", "(why)aa$", "\nU:b|A:")
    assert turns.forks == 1


def test_conversations_beside_each_other_go_on_each_from_their_own_turn(turns: Turns) -> None:
    first, second = said(turns, "U:a|A:", "aa"), said(turns, "U:a|A:", "ab")
    inner = said(turns, "U:x|A:", "xx")
    third = said(turns, "U:a|A:aa$\nU:b|A:", "bb")
    fourth = said(turns, "U:a|A:ab$\nU:b|A:", "bb")
    fifth = said(turns, "U:a|A:aa$\nU:b|A:bb$\nU:c|A:", "cc")
    turns_made = first, second, inner, third, fourth, fifth
    assert [t.previous for t in turns_made] == [None, None, None, first, second, third]
    assert fifth.chain() == [first, third, fifth]
    assert turns.forks == 0


def test_of_equal_answers_each_is_gone_on_from(turns: Turns) -> None:
    two = [said(turns, "U:a|A:", "aa"), said(turns, "U:a|A:", "aa")]
    further = [said(turns, f"U:a|A:aa$\nU:{ask}|A:", "b") for ask in "bc"]
    assert {t.previous for t in further} == set(two)
    assert said(turns, "U:a|A:aa$\nU:d|A:", "b").previous in two, "a third goes on from one of them, too"


def test_the_same_prompt_again_goes_on_from_the_same_turn(turns: Turns) -> None:
    first = said(turns, "U:a|A:", "aa")
    assert [said(turns, "U:a|A:aa$\nU:b|A:", text).previous for text in ("b", "c")] == [first, first]
    assert turns.forks == 0


@pytest.mark.parametrize(
    ("text", "again"), [(" aa\n", "aa"), ("aa ", "aa "), ("\naa", "\naa"), ("aa", " aa"), ("", "")]
)
def test_white_space_around_an_answer_breaks_no_conversation(text: str, again: str) -> None:
    turns = of_texts(Marks(asks="A:", opens=" ", closes="$\n", ends="$\n"))
    said(turns, "U:a|A:", text)
    goes_on(turns, f"U:a|A:{again}$\nU:b|A:", f"{text}$", "\nU:b|A:")
    assert turns.prompt(f"U:a|A:{again}x$\nU:b|A:") is None


CALL = "<call>{f(x)}</call>"


@pytest.mark.parametrize(("text", "again"), [
    (f"\n\n{CALL}", CALL), (f"hm\n\n{CALL}", f"hm\n{CALL}"), (f"hm{CALL}", f"hm\n\n\n{CALL}\n"),
    (CALL, f"<think>\n \n</think>\n\n{CALL}"), ("ab", "<think> </think>ab"),
    (f"<think>\n</think>\nhm\n{CALL}", f"hm{CALL}"),
    (f"<think>so</think>\n\n{CALL}", f"<think>\nso\n</think>{CALL}"), ("a [TOOL_CALLS] [x]", "a[TOOL_CALLS][x]"),
    (f"{CALL}{CALL}", f"{CALL}\n{CALL}"),
])
def test_white_space_beside_the_marks_of_an_answer_breaks_no_conversation(turns: Turns, text: str, again: str) -> None:
    """Agents' command lines cut the text before a tool call and pad reasoning; templates write their own."""
    said(turns, "U:a|A:", text)
    goes_on(turns, f"U:a|A:{again}$\nU:b|A:", f"{text}$", "\nU:b|A:")
    assert turns.forks == 0


@pytest.mark.parametrize(("text", "again"), [
    (f"hm hm{CALL}", f"hmhm{CALL}"), (CALL, CALL.replace("(x)", "( x)")), (CALL, f"<think>so</think>{CALL}"),
    (f"<think>so</think>{CALL}", CALL), (CALL, f"hm{CALL}"), (f"hm{CALL}", CALL), (CALL, f"{CALL}hm"), (CALL, ""),
])
def test_another_answer_is_a_fork_which_is_counted(turns: Turns, text: str, again: str) -> None:
    said(turns, "U:a|A:", text)
    assert turns.prompt(f"U:a|A:{again}$\nU:b|A:") is None
    assert turns.forks == 1


def test_of_answers_that_differ_in_white_space_alone_the_one_that_is_there_is_gone_on_from(turns: Turns) -> None:
    both = [said(turns, "U:a|A:", text) for text in (f"hm{CALL}", f"hm\n{CALL}")]
    further = [said(turns, f"U:a|A:{turn.text}$\nU:b|A:", "b") for turn in reversed(both)]
    assert [t.previous for t in further] == both[::-1]


def test_an_answer_that_was_cut_is_ended_by_the_template_and_may_be_gone_on_with(turns: Turns) -> None:
    said(turns, "U:a|A:", "ab", end="")
    goes_on(turns, "U:a|A:ab$\nU:b|A:", "ab", "$\nU:b|A:")
    goes_on(turns, "U:a|A:ab", "ab", "")
    whole = of_texts()
    said(whole, "U:a|A:", "ab")
    assert whole.prompt("U:a|A:ab") is None, "this answer had ended"


def test_a_special_token_may_be_written_by_the_template_though_no_client_got_it(turns: Turns) -> None:
    turns.record("U:a|A:", turns.encode("U:a|A:"), [*map(ord, "!f(x)$")], None, "f(x)")
    for again in ("f(x)", "!f(x)"):  # as it was got, and as a parsed tool call is rendered
        goes_on(turns, f"U:a|A:{again}$\nU:b|A:", "!f(x)$", "\nU:b|A:")


def test_the_same_prompt_again_is_not_gone_on_with_an_answer_of_nothing(turns: Turns) -> None:
    said(turns, "U:a|A:", " ", end="")
    assert turns.prompt("U:a|A:") is None


def test_a_template_with_white_space_before_the_end_of_a_turn_ends_it_as_it_was_sampled() -> None:
    turns = of_texts(Marks(asks="A:", opens=" ", closes=" $", ends=" $"))
    said(turns, "U:a|A:", "ab")
    goes_on(turns, "U:a|A: ab $U:b|A:", "ab$", "U:b|A:")


def test_with_no_marks_known_only_the_token_that_was_sampled_ends_a_turn() -> None:
    turns = of_texts(Marks())
    said(turns, "U:a|A:", "ab")
    goes_on(turns, "U:a|A:ab$\nU:b|A:", "ab$", "\nU:b|A:")
    said(turns, "U:b|A:", "ab", end="")
    assert turns.prompt("U:b|A:ab$\nU:b|A:") is None


def test_who_knows_the_messages_tells_forks_that_no_text_shows(turns: Turns) -> None:
    said(turns, "T|U:a|A:", "aa")  # tools stand before the last question
    assert turns.prompt("U:a|A:aa$\nT|U:b|A:") is None
    assert turns.forks == 0
    assert turns.prompt("U:a|A:aa$\nT|U:b|A:", lambda: ["T|U:a|A:"]) is None
    assert turns.forks == 1


def test_a_fork_is_counted_where_the_messages_say_nothing(turns: Turns) -> None:
    said(turns, "U:a|A:", "(why)aa")
    assert turns.prompt("U:b|A:", list) is None, "another conversation"
    assert turns.forks == 0
    assert turns.prompt("U:a|A:aa$\nU:b|A:", list) is None, "as of a client of /v1/messages"
    assert turns.forks == 1


def test_a_fork_is_one_too_where_an_older_answer_is_gone_on_from(turns: Turns) -> None:
    said(turns, "U:a|A:", "aa")
    said(turns, "U:a|A:aa$\nU:b|A:", "(so)bb")
    goes_on(turns, "U:a|A:aa$\nU:b|A:bb$\nU:c|A:", "aa$", "\nU:b|A:bb$\nU:c|A:")
    assert turns.forks == 1


def test_a_stop_text_that_the_template_writes_too_does_not_drop_the_end_of_a_turn(turns: Turns) -> None:
    said(turns, "U:a|A:", "4", end="\n")
    goes_on(turns, "U:a|A:4$\nU:b|A:", "4\n", "$\nU:b|A:")
    plain = of_texts(Marks(asks="A:", closes="\n", ends="\n"))
    said(plain, "U:a|A:", "4", end="\n")
    goes_on(plain, "U:a|A:4\nU:b|A:", "4\n", "U:b|A:")


def of_bytes() -> Turns:
    return Turns(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), lambda: MARKS)


@pytest.mark.parametrize(("count", "text"), [(4, "a好"), (3, "a\ufffd"), (3, "a"), (2, "a\ufffd"), (2, "a")])
def test_an_answer_that_was_cut_at_a_character_of_several_tokens_is_gone_on_with(count: int, text: str) -> None:
    turns = of_bytes()
    sampled = list("a好".encode())[:count]
    turns.record("U:a|A:", turns.encode("U:a|A:"), sampled, None, text, is_cut=True)
    assert turns.prompt(f"U:a|A:{text}") == [*turns.encode("U:a|A:"), *sampled]
    after = turns.prompt(f"U:a|A:{text}$\nU:b|A:")
    assert after == [*turns.encode("U:a|A:"), *sampled, *turns.encode("$\nU:b|A:")]


def test_an_answer_ends_with_no_part_of_a_character() -> None:
    turns = of_bytes()
    turn = turns.record("U:a|A:", turns.encode("U:a|A:"), list("好".encode()), None, "好")
    assert turns.end_of(turn) == ""
    ended = turns.record("U:b|A:", turns.encode("U:b|A:"), list("好$".encode()), None, "好")
    assert turns.end_of(ended) == "$"
