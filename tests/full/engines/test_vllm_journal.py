"""Promise 12 on a real vLLM engine: a lost answer goes on, by `self.model` and by clients of the endpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.engine_sessions import HELLO, Session, serving
from tests.helpers.engines import PROMPT, Live, again, cut_off, tokens_of
from tests.helpers.journals import RUN, Written
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.run_journal import RunJournal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

LENGTH = 120
GREEDY = Sampling(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


def scored(live: Live, answer: Completion) -> list[float]:
    values = live.run(live.engine.logprobs([*answer.prompt_token_ids, *answer.token_ids]))
    return values[len(answer.prompt_token_ids) - 1 :]


def test_promise_12_a_greedy_answer_is_the_undisturbed_one_and_what_was_kept_is_bit_equal(live: Live) -> None:
    [expected] = live.run(live.engine.generate(PROMPT, GREEDY))
    for least in (1, 40, 90):
        writer = live.run(cut_off(live, GREEDY, least))
        kept = writer.kept()
        assert kept is not None
        [[part]] = [list(answers.values()) for answers in kept.calls.values()]
        [answer] = again(live, GREEDY, writer)
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert (answer.finish_reason, answer.splices) == ("length", (len(part.tokens),))
        assert answer.logprobs is not None
        assert answer.logprobs[: len(part.tokens)] == part.logprobs
        assert answer.logprobs == pytest.approx(scored(live, answer), abs=2e-3)
        assert answer.version_spans == ((0, 0, LENGTH),)


def test_several_sampled_answers_go_on_each_by_itself(live: Live) -> None:
    sampling = Sampling(max_tokens=LENGTH, ignore_eos=True, n=3, seed=5)
    writer = live.run(cut_off(live, sampling, 20))
    kept = writer.kept()
    assert kept is not None
    [parts] = kept.calls.values()
    answers = again(live, sampling, writer)
    for choice, answer in enumerate(answers):
        assert answer.token_ids[: len(parts[choice].tokens)] == parts[choice].tokens
        assert len(answer.token_ids) == LENGTH
        assert answer.logprobs == pytest.approx(scored(live, answer), abs=2e-3)
    assert len({tuple(a.token_ids) for a in answers}) == 3


def test_a_chunk_says_which_weights_made_it_although_they_changed_in_flight(
    live: Live, tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "same")
    writer = live.run(cut_off(live, GREEDY, 60, lambda: live.engine.load_weights(1, str(tmp_path / "same"))))
    kept = writer.kept()
    assert kept is not None
    [[part]] = [list(answers.values()) for answers in kept.calls.values()]
    (first, start, middle), (second, changed, end) = part.spans
    assert (first, start, second, end) == (0, 0, 1, len(part.tokens))
    assert middle == changed >= 30
    [answer] = again(live, GREEDY, writer)
    assert answer.version_spans == ((0, 0, middle), (1, middle, LENGTH))


def test_trap_4_a_prompt_that_goes_on_finds_its_blocks_and_none_of_old_weights(live: Live, other: Path) -> None:
    """The engine reads again what fills no block, or after a change of weights everything."""
    cached: list[tuple[int, int]] = []
    source = live.engine.outputs

    async def outputs(*args: Any, **more: Any) -> Any:
        async for output, adapter in source(*args, **more):
            if output.finished:
                cached.append((len(output.prompt_token_ids), output.num_cached_tokens))
            yield output, adapter

    live.engine.outputs = outputs  # type: ignore[method-assign]
    try:
        long = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
        writer = live.run(cut_off(live, long, 160))
        [part] = tokens_of(writer.kept())
        again(live, long, writer)
        [(read, found)] = cached
        assert read == len(PROMPT) + part
        block = int(live.engine._llm.vllm_config.cache_config.block_size)
        assert found >= (read - 1) // block * block > 0
        live.run(live.engine.load_weights(1, str(other)))
        [answer] = again(live, long, writer)
        assert cached[1] == (read, 0), "keys and values of the old weights were used"
        assert answer.logprobs is not None
        assert answer.logprobs[part:] == pytest.approx(scored(live, answer)[part:], abs=2e-3)
        assert answer.logprobs[:part] != pytest.approx(scored(live, answer)[:part], abs=2e-3)
        assert answer.version_spans == ((0, 0, part), (1, part, 200))
    finally:
        del live.engine.outputs


def test_an_answer_over_three_steps_has_three_spans_and_the_logprobs_of_each_version_s_model(
    live: Live, tiny: Path, other: Path
) -> None:
    """`in_flight: cut`: it is cut at the end of two steps, and goes on under the next weights."""
    models, data = [tiny, other, tiny], b""
    for version, least in ((1, 40), (2, 80)):
        data = live.run(cut_off(live, GREEDY, least, earlier=data)).data
        live.run(live.engine.load_weights(version, str(models[version])))
    cut = Written()
    cut.data = data
    [answer] = again(live, GREEDY, cut)
    assert len(answer.token_ids) == LENGTH
    [(v0, start, first), (v1, _, second), (v2, _, end)] = answer.version_spans
    assert (v0, v1, v2, start, end) == (0, 1, 2, 0, LENGTH)
    assert answer.splices == (first, second)
    assert answer.logprobs is not None
    of_tiny = scored(live, answer)
    live.run(live.engine.load_weights(3, str(other)))
    of_other = scored(live, answer)
    assert answer.logprobs == pytest.approx([*of_tiny[:first], *of_other[first:second], *of_tiny[second:]], abs=2e-3)
    assert of_tiny[first:second] != pytest.approx(of_other[first:second], abs=0.1), "the models differ"


CHAT = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
TEXT = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}


def answered(session: Session, path: str, body: dict[str, Any]) -> Any:
    """Return the text or the token ids of an answer, whole or in a stream."""
    if not body.get("stream"):
        [choice] = session.post(path, body)["choices"]
        return choice["token_ids"] if "sampling_params" in body else choice.get("text") or choice["message"]["content"]
    text, headers = "", {"x-api-key": "secret"}
    with httpx.stream("POST", session.root + path, json=body, headers=headers, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", CHAT), ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}), ("/v1/completions", TEXT),
    ("/v1/completions", {**TEXT, "stream": True}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {
        "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}}),
])
def test_promise_12_a_client_gets_the_rest_of_a_lost_answer(live: Live, path: str, body: dict[str, Any]) -> None:
    with serving(live) as server:
        whole = Session(live, server)
        expected = answered(whole, path, body)
        [undisturbed] = whole.kept()

        lost, writer = Session(live, server), Written()
        lost.model.journal = RunJournal(RUN, writer)

        async def cut_off() -> None:
            async with httpx.AsyncClient(timeout=120) as client:
                asking = asyncio.ensure_future(
                    client.post(lost.root + path, json=body, headers={"x-api-key": "secret"}))
                while sum(tokens_of(writer.kept())) < 30:
                    assert not asking.done(), "the answer was there before it could be cut off"
                    await asyncio.sleep(0.001)
                    writer.look()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        live.run(cut_off())
        [part] = tokens_of(writer.kept())
        assert 30 <= part < LENGTH
        asked: list[int] = []
        source = live.engine.outputs

        def outputs(prompt: Any, params: Any, *args: Any, **more: Any) -> Any:
            asked.append(params.max_tokens)
            return source(prompt, params, *args, **more)

        live.engine.outputs = outputs  # type: ignore[method-assign]
        try:
            rest, data = Session(live, server), Written()
            rest.model.journal = RunJournal(RUN, data, writer.kept())
            assert answered(rest, path, body) == expected
            [experience] = rest.kept()
            assert experience.tokens.tolist() == undisturbed.tokens.tolist()
            assert experience.info["splices"] == [part]
            assert asked == [LENGTH - part]
            third = Session(live, server)
            writer.data += data.data
            third.model.journal = RunJournal(RUN, Written(), writer.kept())
            assert answered(third, path, body) == expected
            assert asked == [LENGTH - part], "a whole answer is not asked again"
            [experience] = third.kept()
            rest.exact(experience)
        finally:
            del live.engine.outputs
