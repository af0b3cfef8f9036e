"""Make a tiny model unless it exists, and train it on `config.yaml` beside this file.

    python -m examples.reasoning_gym [--set key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from examples.grpo.tiny_model import make_tiny_model
from trinity_es.config.config import load_config

CONFIG = Path(__file__).with_name("config.yaml")


def main() -> None:
    overrides = [text for text in sys.argv[1:] if text != "--set"]
    config = load_config(CONFIG, overrides)
    folder = Path(config.model.model_path)
    if config.explorer.rollout_model.engine_type == "vllm" and not folder.exists():
        print(f"making a tiny model in {make_tiny_model(folder)}")
    command = [sys.executable, "-m", "trinity_es", "run", str(CONFIG), *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
