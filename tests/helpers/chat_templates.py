"""Tokenizers with chat templates and tool-call formats of real models, over a small byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
TOOLS: list[dict[str, Any]] = [{
    "type": "function",
    "function": {
        "name": "weather", "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}]
PROSE = (
    "The weather is fine today, and the answer to the question is forty-two. Think about it, then answer again. "
    '{"name": "weather", "arguments": {"city": "Paris"}} the user asks what the assistant says, in the end it rains. '
)


def _qwen(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def _deepseek(arguments: str) -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + arguments
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    eos: str
    bos: str = ""
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Added tokens, one id each, that decoding does not skip."""
    call: Callable[[str], str] | None = None
    """Function from arguments to the text of a tool call; None if the template has no tools."""
    arguments: type = dict
    """Type in which clients send arguments back: parsed (dict) or as text (str)."""
    system: bool = True


STYLES = {
    "qwen2_5": Style(
        eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), added=("<tool_call>", "</tool_call>"), call=_qwen,
    ),
    "qwen3": Style(
        eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), call=_qwen,
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "llama3_2": Style(
        eos="<|eot_id|>", bos="<|begin_of_text|>", special=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        call=lambda arguments: f'{{"name": "weather", "parameters": {arguments}}}',
    ),
    "mistral_v3": Style(
        eos="</s>", bos="<s>", special=(
            "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        call=lambda arguments: f'[TOOL_CALLS] [{{"name": "weather", "arguments": {arguments}, "id": "abcdefghi"}}]',
    ),
    "gemma3": Style(eos="<end_of_turn>", bos="<bos>", special=("<start_of_turn>", "<eos>")),
    "deepseekv3": Style(
        eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", special=(
            "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        ),
        added=("<think>", "</think>"), call=_deepseek, arguments=str,
    ),
    "phi3_5": Style(
        eos="<|end|>", special=("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    ),
}


@cache
def tokenizer(style: str) -> Any:
    """Return the tokenizer of this style, a `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = STYLES[style]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    template = (FOLDER / f"{style}.jinja").read_text()
    bpe.train_from_iterator([PROSE, template, json.dumps(TOOLS)] * 3, trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False)
                            for t in dict.fromkeys((made.eos, made.bos, *made.special)) if t])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in made.added])
    end = "<|endoftext|>" if style == "phi3_5" else made.eos  # its turns end with another token than its texts
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=end, bos_token=made.bos or None, chat_template=template,
        clean_up_tokenization_spaces=False,
    )
