"""P57: workflows and rewards of mathematics under the names that users of Trinity-RFT know, with math-verify."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.helpers.ready_made import Answers, played, rewards
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.events.errors import ConfigError
from trinity_es.workflows.math_rewards import MathDAPORewardFn, boxed_answer
from trinity_es.workflows.registry import REWARD_FUNCTIONS
from trinity_es.workflows.rewards import rewarded

GSM8K = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24 in May.\n48+24 = 72 altogether.\n#### 72"}
MATH = {"problem": "Half of 1?", "solution": "It is $\\frac{2}{4}$, so \\boxed{\\frac{1}{2}}."}
OF_GSM8K = {"raw_task": GSM8K, "format_args": {"prompt_key": "question", "response_key": "answer"}}
OF_MATH = {"raw_task": MATH, "format_args": {"prompt_key": "problem", "response_key": "solution"}}


@pytest.fixture(scope="module", autouse=True)
def _math_verify() -> None:
    pytest.importorskip("math_verify")


def tagged(answer: str) -> str:
    return f"<think> hm </think> <answer> {answer} </answer>"


@pytest.mark.parametrize("kind", ["", "async_"])
async def test_math_workflow(pool: WorkerPool, kind: str) -> None:
    answers = [tagged("72"), tagged("$\\frac{144}{2}$"), "so it is 72", tagged("73"), tagged("none"), "I don't know"]
    found = await rewards(pool, f"{kind}math_workflow", answers, **OF_GSM8K)
    assert found == pytest.approx([1.1, 1.1, 0.9, 0.1, 0.1, -0.1])


@pytest.mark.parametrize("kind", ["", "async_"])
async def test_math_boxed_workflow(pool: WorkerPool, kind: str) -> None:
    right = ["\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", "\\boxed{\\dfrac12}"]
    answers = [*right, "1/2", "\\boxed{2}", "\\boxed{", "\\boxed{?}"]
    assert await rewards(pool, f"{kind}math_boxed_workflow", answers, **OF_MATH) == [1, 1, 1, 0, 0, 0, 0]
    thinking = {"workflow_args": {"with_think": True, "format_score_coef": 0.2}}
    answers = ["\\boxed{0.5}", "<think>\n</think>\n\\boxed{0.5}", "<think> 3"]
    assert await rewards(pool, f"{kind}math_boxed_workflow", answers, **OF_MATH, **thinking) == [0.8, 1.0, -0.2]


async def test_the_prompts_are_those_of_trinity_rft(pool: WorkerPool) -> None:
    engine = Answers("72")
    await played(pool, "math_workflow", engine, **OF_GSM8K)
    await played(pool, "math_boxed_workflow", engine, **OF_GSM8K)
    await played(pool, "math_boxed_workflow", engine, **OF_GSM8K, workflow_args={"with_think": True})
    await played(pool, "math_boxed_workflow", engine, **OF_GSM8K, workflow_args={"use_base": True})
    await played(pool, "math_eval_workflow", engine, **OF_GSM8K)
    r1, boxed, thinking, base, evaluated = engine.prompts
    assert r1.startswith("A conversation between User and Assistant. The user asks a question, and the Assistant")
    assert r1.endswith("<answer> answer here </answer>.\n\nHow many clips?\n")
    step = "Please reason step by step, and put your final answer within \\boxed{}."
    assert boxed == f"{step}\nHow many clips?\n"
    assert thinking.startswith("You are a helpful assistant that solves MATH problems. You should first thinks about")
    assert base == f"System:{step}\nUser:\nHow many clips?\nAssistant:\n"
    assert evaluated == f"You are a helpful assistant.\nHow many clips?\n{step}\n"
    assert (engine.sampling[-1].temperature, engine.sampling[-1].top_p) == (0.6, 0.8)
    own = {**OF_GSM8K, "format_args": {**OF_GSM8K["format_args"], "system_prompt": "Be brief."}}
    await played(pool, "math_workflow", engine, **own)
    assert engine.prompts[-1] == "Be brief.\nHow many clips?\n"


async def test_an_evaluation_counts_answers_that_are_not_boxed(pool: WorkerPool) -> None:
    right = ["\\boxed{72}", "So the final answer is: 72.", "答案是 72。", "48 + 24 clips make 72", "1,072 - 1,000 = 72"]
    wrong = ["72, so \\boxed{7}", "The answer is 7\n72", "none", "72 of 73"]
    found = await rewards(pool, "async_math_eval_workflow", [*right, *wrong], **OF_GSM8K)
    assert found == [1.0] * len(right) + [0.0] * len(wrong)


async def test_an_evaluation_tells_its_accuracy(pool: WorkerPool) -> None:
    for kind in ("", "async_"):
        done = await played(pool, f"{kind}math_eval_workflow", Answers("\\boxed{72}", "\\boxed{7}"), 2, **OF_GSM8K)
        assert sorted(r.metrics["accuracy"] for r in done.results) == [0.0, 1.0], done.failures


def said(reward: str, response: str, truth: Any, **more: Any) -> dict[str, float]:
    """Call a registered reward as a grader does."""
    arguments = more.pop("reward_fn_args", {})
    return rewarded({"reward_fn": reward, "reward_fn_args": arguments}, {"response": response, "truth": truth, **more})


LINES = "<think>\nis it \\boxed{{5}}, or \\boxed{{7}}?\n</think>\n<answer>{}</answer>"


@pytest.mark.parametrize(("reward", "response", "truth", "accuracy"), [
    *(("accuracy_reward", *row) for row in (
        ("so $x = \\boxed{4}$", "$4$", 1.0), ("so $x = \\boxed{4}$", "4", 1.0), ("it is 4", "$4$", 0.0),
        ("\\boxed{72}", GSM8K["answer"], 1.0), ("\\boxed{24}", GSM8K["answer"], 0.0), ("\\boxed{1000}", "1,000", 1.0),
        ("\\boxed{\\frac{1}{2}}", "1/2", 1.0), ("\\boxed{0.5}", "0.50", 1.0), ("\\boxed{3}", "4", 0.0),
        ("\\boxed{\\frac{3}{4}}", "$0.75$", 1.0), ("\\boxed{5}", "$4$", 0.0), ("no idea", "$4$", 0.0),
    )),
    *(("gsm8k_reward", *row) for row in (
        ("6 * 12 = 72\n#### 72", GSM8K["answer"], 1.0), ("the answer is 72.", GSM8K["answer"], 1.0),
        ("\\boxed{72}", GSM8K["answer"], 1.0), ("first 72, then 24\n#### 24", GSM8K["answer"], 0.0),
        ("#### 1,072", "#### 1072", 1.0), ("no idea", GSM8K["answer"], 0.0), ("####", GSM8K["answer"], 0.0),
        ("72", 72, 1.0),
    )),
    *(("math_reward", LINES.format(answer), "7", accuracy) for answer, accuracy in (
        ("\n7\n", 1.0), ("\n8\n", 0.0), ("7", 1.0))),
    *((reward, response, "$x^2+y^2=25$", accuracy) for reward in ("accuracy_reward", "math_reward")
      for response, accuracy in (("so it is \\boxed{25}", 0.0), ("$25$", 0.0), ("\\boxed{x^2+y^2=25}", 1.0))),
    *(("math_boxed_reward", f"\\boxed{{{answer}}}", "\\boxed{2}, so \\boxed{3}", accuracy) for answer, accuracy in (
        ("3", 1.0), ("2", 0.0))),
])
def test_the_accuracy_of_an_answer(reward: str, response: str, truth: Any, accuracy: float) -> None:
    found = said(reward, response, truth)
    assert found.pop("accuracy") == accuracy
    assert found.keys() == ({"format_score"} if reward in ("math_reward", "math_boxed_reward") else set())


def test_format_reward() -> None:
    assert said("format_reward", "<think>\na\n</think>\n<answer>\nb\n</answer>", None) == {"format_score": 0.1}
    assert said("format_reward", "<answer>b</answer>", None) == {"format_score": -0.1}
    assert said("format_reward", "yes", None, reward_fn_args={"pattern": "yes|no"}) == {"format_score": 0.1}


def test_math_dapo_reward_is_1_or_minus_1_and_less_for_long_responses() -> None:
    right = "<think>\\boxed{3}</think>\\boxed{4}"
    assert said("math_dapo_reward", right, "4") == {"accuracy": 1.0, "format_score": 0.0}
    assert said("math_dapo_reward", "<think>\\boxed{4}</think>4", "4")["accuracy"] == -1.0
    limits = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 20, "cache_length": 10}
    reward = MathDAPORewardFn(**limits)  # type: ignore[arg-type]
    for name in ("response_token", "completion_ids"):
        found = {n: reward("\\boxed{4}", "4", **{name: [0] * n})["format_score"] for n in (0, 9, 10, 15, 20, 21)}
        assert found == {0: 0.0, 9: 0.0, 10: 0.0, 15: -0.5, 20: -1.0, 21: -1.0}
    with pytest.raises(ConfigError, match="enable_overlong_penalty needs the response's tokens"):
        reward("\\boxed{4}", "4")


@pytest.mark.parametrize("workflow", ["single_turn", "math_boxed_workflow", "async_math_workflow", "simple_workflow"])
async def test_every_workflow_has_the_overlong_penalty(pool: WorkerPool, workflow: str) -> None:
    limits = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 12, "cache_length": 6}
    row = {"raw_task": {"prompt": "2+2?", "answer": "4"}, "reward_fn": "math_dapo_reward", "reward_fn_args": limits}
    assert await rewards(pool, workflow, ["\\boxed{4}"], **row) == [0.5]  # 9 tokens


@pytest.mark.parametrize(("text", "boxed"), [
    ("\\boxed{a{b}c} then \\boxed{\\text{d}}", "\\text{d}"), ("\\fbox{3}", "3"), ("\\boxed 5$ so", "5"),
    ("\\boxed{4", None), ("none", None), ("\\boxed{}", ""),
])
def test_the_last_box_counts(text: str, boxed: str | None) -> None:
    assert boxed_answer(text) == boxed


async def test_a_truth_that_is_missing_is_the_datas_fault(pool: WorkerPool) -> None:
    done = await played(pool, "math_workflow", Answers("72"), raw_task={"prompt": "?"})
    [(_, kind, message)] = done.failures
    assert (kind, message) == ("data", "the row has no answer to compare with: set format.response_key to its key")


@pytest.mark.parametrize("name", ["math_reward", "math_boxed_reward", "accuracy_reward", "gsm8k_reward"])
@pytest.mark.parametrize("where", ["math_verify.parser.extract_target_from_pred", "math_verify.grader.sympy_expr_eq"])
def test_what_math_verify_raises_is_no_wrong_answer(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("trinity_es.workflows.math_grader")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("sympy")

    monkeypatch.setattr(where, broken)
    with pytest.raises(ZeroDivisionError):
        said(name, "so \\boxed{0.5}", "$\\frac{1}{2}$")


async def test_an_answer_that_keeps_the_grader_busy_is_no_zero(pool: WorkerPool) -> None:
    hard = "\\boxed{" + "9^{" * 5 + "9" + "}" * 5 + "}"
    done = await played(pool, "async_math_boxed_workflow", Answers("\\boxed{0.5}", hard), 2, **OF_MATH,
                        reward_fn_args={"grader_timeout": 2.0})
    assert [r.metrics["reward"] for r in done.results] == [1.0]
    [(_, kind, message)] = done.failures
    assert kind == "grader", message


@pytest.mark.parametrize("name", REWARD_FUNCTIONS.names())
def test_every_registered_reward_is_there(name: str) -> None:
    assert REWARD_FUNCTIONS.get(name).__doc__


async def test_a_reward_model_is_called_with_the_answer_and_its_messages(pool: WorkerPool) -> None:
    for kind in ("", "async_"):
        found = await rewards(pool, f"{kind}math_rm_workflow", ["abc"], **OF_GSM8K, reward_fn=f"{__name__}:asked")
        assert found == [3.0]


def asked(answer: Any, messages: Any, ground_truth: Any) -> float:
    assert messages[-1]["content"] == GSM8K["question"]
    assert ground_truth == GSM8K["answer"]
    return float(len(answer.response_text))
