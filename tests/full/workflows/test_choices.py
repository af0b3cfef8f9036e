"""P57: multiple choice and countdown: right, wrong and unreadable answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ready_made import Answers, played, rewards
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.events.errors import DataError
from trinity_es.workflows.countdown import CountDownRewardFn

MMLU = {"raw_task": {"question": "The capital of Italy?", "choices": ["Paris", "Rome", "Bern", "Wien"], "answer": 1},
        "format_args": {"prompt_key": "question"}}
GPQA = {"raw_task": {"Question": "Which?", "Correct Answer": "this\n", "Incorrect Answer 1": "that",
                     "Incorrect Answer 2": "it", "Incorrect Answer 3": "none"}}


@pytest.mark.parametrize("kind", ["", "async_"])
async def test_multiple_choice_of_mmlu(pool: WorkerPool, kind: str) -> None:
    answers = {
        "It is Rome.\nAnswer: B": 1, "**Answer:** (B)": 1, "answer: $b$": 1, "so \\boxed{B}": 1,
        "Answer: A? No.\nAnswer: B": 1, "Answer: B? No.\nAnswer: A": 0, "<think>Answer: B</think>Answer: C": 0,
        "Rome": 0, "B": 0, "Answer: Because": 0,
    }
    assert await rewards(pool, f"{kind}multiple_choice_workflow", list(answers), **MMLU) == list(answers.values())


async def test_the_prompt_has_lettered_choices(pool: WorkerPool) -> None:
    engine = Answers("Answer: B")
    await played(pool, "multiple_choice_workflow", engine, **MMLU)
    assert "where LETTER is one of ABCD." in engine.prompts[0]
    assert engine.prompts[0].endswith("The capital of Italy?\n\nA) Paris\nB) Rome\nC) Bern\nD) Wien\n")


async def test_the_choices_of_gpqa_have_an_order_of_their_own_that_is_always_the_same(pool: WorkerPool) -> None:
    engine = Answers("Answer: A", "Answer: B", "Answer: C", "Answer: D")
    found = [await played(pool, "multiple_choice_workflow", engine, **GPQA) for _ in range(4)]
    assert len(set(engine.prompts)) == 1
    [right] = [i for i, done in enumerate(found) if done.results[0].metrics["accuracy"] == 1.0]
    assert f"{'ABCD'[right]}) this\n" in engine.prompts[0]


@pytest.mark.parametrize(("row", "says"), [
    ({"prompt": "?", "answer": 0}, "the row's 'choices' are None: a list of 2 to 26 answers"),
    ({"prompt": "?", "choices": ["a", "b"], "answer": "Rome"}, "the row's answer is 'Rome': a letter or a number"),
])
async def test_a_row_without_choices_or_letter_is_the_datas_fault(pool: WorkerPool, row: Any, says: str) -> None:
    done = await played(pool, "multiple_choice_workflow", Answers("Answer: A"), raw_task=row)
    [(_, kind, message)] = done.failures
    assert kind == "data"
    assert says in message


@pytest.mark.parametrize(("response", "score"), [
    ("so\n<answer>(6 - 2) * 6</answer>", 1.0), ("<answer>6*6-2</answer> <answer>6 * (6 - 2)</answer>", 1.0),
    ("<answer>6 + 6 + 2</answer>", 0.1), ("<answer>2 * 12</answer>", 0.1), ("<answer>6 * 6 / (2 - 2)</answer>", 0.1),
    ("<answer>six</answer>", 0.1), ("<answer>6 ** 6 - 2</answer>", 0.1),
    ("<answer>(6 - 2) * 6</answer>\nas asked", 0.0),
    ("(6 - 2) * 6", 0.0),
    ("<answer>__import__('os').abort(6, 6, 2)</answer>", 0.1),
    ("<answer>" + "(" * 5000 + "6 - 2) * 6</answer>", 0.1),
])
@pytest.mark.parametrize("truth", ['{"target": 24, "numbers": [6, 2, 6]}', {"target": 24, "numbers": [6, 2, 6]}])
def test_countdown(response: str, score: float, truth: Any) -> None:
    assert CountDownRewardFn()(response=response, truth=truth) == {"score": score}


def test_countdown_reads_numbers_that_are_texts() -> None:
    for truth in ({"target": "6", "numbers": ["1", "2", "3"]}, {"target": 6.0, "numbers": [1.0, 2.0, 3.0]}):
        assert CountDownRewardFn()(response="<answer>1+2+3</answer>", truth=truth) == {"score": 1.0}


@pytest.mark.parametrize("truth", [
    None, "24", 24, "no JSON", {"target": 24}, {"numbers": [1]}, {"target": 24, "numbers": []},
    {"target": 24, "numbers": [1.5]}, {"target": "x", "numbers": [1]}, {"target": 24, "numbers": ["a"]}, [24, [1]],
])
def test_a_truth_that_is_none_of_countdowns_is_the_datas_fault(truth: Any) -> None:
    for response in ("<answer>1</answer>", "no answer"):
        with pytest.raises(DataError, match=r"the row's answer is .* a target and a list of whole numbers are"):
            CountDownRewardFn()(response=response, truth=truth)
