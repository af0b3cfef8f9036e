"""Make a tiny model that can call tools, and its tasks, where there are none yet, and train it on `config.yaml`.

    python -m examples.openai_agent [--set key=value ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import AutoTokenizer

from examples.grpo.taskset import write_taskset
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.config.config import load_config

CONFIG = Path(__file__).with_name("config.yaml")

TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{% if message['tool_calls'] %}<tool_call>\n{\"name\": \"{{ message['tool_calls'][0]['function']['name'] }}\", "
    "\"arguments\": {{ message['tool_calls'][0]['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% else %}{{ message['content'] }}{% endif %}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Calls are written as Hermes writes them; a tool speaks as the user does."""


def main() -> None:
    overrides = [text for text in sys.argv[1:] if text != "--set"]
    config = load_config(CONFIG, overrides)
    model, [tasks] = Path(config.model.model_path), config.buffer.explorer_input.tasksets
    if not model.exists():
        print(f"making a tiny model in {make_tiny_model(model)}")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
    data = Path(tasks.path).parent
    if not data.exists():
        write_taskset(data)
        for file in data.glob("*.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps({**row, "prompt": "Which?"}) + "\n" for row in rows))
    command = [sys.executable, "-m", "trinity_es.cli", "run", str(CONFIG), *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
