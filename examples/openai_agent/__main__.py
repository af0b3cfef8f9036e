"""Make a tiny model that can call a tool, and its tasks, unless they exist, and train it on `config.yaml`.

    python -m examples.openai_agent [--set key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from examples.openai_agent.tiny_model import make_model, write_tasks
from trinity_es.config.config import load_config

CONFIG = Path(__file__).with_name("config.yaml")


def main() -> None:
    config = load_config(CONFIG, [text for text in sys.argv[1:] if text != "--set"])
    model, data = Path(config.model.model_path), Path(config.buffer.explorer_input.tasksets[0].path).parent
    if not model.exists():
        print("teaching a tiny model to call a tool: half a minute or less", flush=True)
        make_model(model)
    if not data.exists():
        write_tasks(data)
    os.execv(sys.executable, [sys.executable, "-m", "trinity_es", "run", str(CONFIG), *sys.argv[1:]])


if __name__ == "__main__":
    main()
