"""A tiny model that knows the form of a tool call, but not yet that a call is better than a guess.

The model of examples/grpo is pretrained for up to half a minute on one core. To "How many plums?" it answers with a
call of the tool `count` about every other time, and with a guess otherwise. Nothing is downloaded.

    python -m examples.openai_agent.tiny_model runs/openai_agent
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.grpo.tiny_model import make_tiny_model

__all__ = ["CHAT_TEMPLATE", "make_model", "write_tasks"]

ITEMS = ["apples", "bananas", "cherries", "dates", "figs", "melons", "plums", "tomatoes"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", "
    "\"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% else %}{{ message.content }}{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Template with calls in Hermes' form, which vLLM's parser `hermes` reads. It omits `tools`, since the model is
pretrained with its only tool; a template for a larger model shows them.
"""


def make_model(directory: str | Path, steps: int = 250, seed: int = 0) -> Path:
    """Pretrain a model into the new folder `directory`, which is returned. The same seed gives the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(directory)
    half = make_tiny_model(path.with_name(f".{path.name}.half"), seed)  # renamed after the training
    tokenizer = AutoTokenizer.from_pretrained(half)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # not special: the parser has to see them
    tokenizer.chat_template = CHAT_TEMPLATE
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    optimizer, dice = torch.optim.AdamW(model.parameters()), random.Random(seed)
    for step in range(steps):
        lessons = [tokenizer.apply_chat_template(_lesson(dice), tokenize=False) for _ in range(16)]
        rows = tokenizer(lessons, return_tensors="pt", padding=True, add_special_tokens=False)
        begun, ended = ((rows.input_ids == mark).cumsum(1) for mark in (assistant, end))
        labels = rows.input_ids.clone()
        labels[:, 1:][(begun == ended)[:, :-1]] = -100  # no loss on other messages and padding
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 30, (steps - step) / 100)
        optimizer.zero_grad()
        model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(half)
    tokenizer.save_pretrained(half)
    return half.rename(path)


def _lesson(dice: random.Random) -> list[dict[str, Any]]:
    """Return a conversation whose answer is, with equal chance, the tool's result or a guess."""
    item, number = dice.choice(ITEMS), dice.choice(NUMBERS)
    question, answer = {"role": "user", "content": f"How many {item}?"}, {"role": "assistant", "content": number}
    if dice.random() < 0.5:
        return [question, answer]
    call = {"type": "function", "function": {"name": "count", "arguments": {"item": item}}}
    return [question, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": number}, answer]


def write_tasks(directory: str | Path, train_rows: int = 512, eval_rows: int = 32, seed: int = 0) -> Path:
    """Write `train.jsonl` and `eval.jsonl` to `directory`, and return it. A row has a question, answer and shelf."""
    path, dice = Path(directory), random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train_rows), ("eval", eval_rows)):
        lines = []
        for _ in range(count):
            shelf, item = {item: dice.choice(NUMBERS) for item in ITEMS}, dice.choice(ITEMS)
            lines.append(json.dumps({"prompt": f"How many {item}?", "answer": shelf[item], "shelf": shelf}) + "\n")
        (path / f"{name}.jsonl").write_text("".join(lines))
    return path


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/openai_agent")
    print(make_model(folder / "model"), write_tasks(folder / "data"))
