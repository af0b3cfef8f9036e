"""Make a tiny model unless it exists, and train it on a config beside this file.

    python -m examples.environments verifiers [--set key=value ...]
    python -m examples.environments openenv [--set key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from examples.grpo.tiny_model import make_tiny_model
from trinity_es.config.config import load_config

CONFIGS = {name: Path(__file__).with_name(f"{name}.yaml") for name in ("verifiers", "openenv")}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in CONFIGS:
        sys.exit(__doc__)
    file, rest = CONFIGS[sys.argv[1]], sys.argv[2:]
    config = load_config(file, [text for text in rest if text != "--set"])
    folder = Path(config.model.model_path)
    if config.explorer.rollout_model.engine_type == "vllm" and not folder.exists():
        print(f"making a tiny model in {make_tiny_model(folder)}")
    os.execv(sys.executable, [sys.executable, "-m", "trinity_es", "run", str(file), *rest])


if __name__ == "__main__":
    main()
