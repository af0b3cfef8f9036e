"""A task that a tiny model can learn only by reading its prompt: answer `c=` with the letter c, eight times.

    python -m examples.grpo.taskset data/letters
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

__all__ = ["LETTERS", "write_taskset"]

LETTERS = "abcdefghijklmnop"


def write_taskset(directory: str | Path, train_rows: int = 512, seed: int = 0) -> Path:
    """Write `train.jsonl` (each letter equally often, shuffled) and `eval.jsonl` (each letter once) to `directory`.

    A row is `{"prompt": "c=", "answer": "c"}`.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    letters = [LETTERS[i % len(LETTERS)] for i in range(train_rows)]
    random.Random(seed).shuffle(letters)
    for name, chosen in (("train", letters), ("eval", list(LETTERS))):
        rows = [json.dumps({"prompt": f"{letter}=", "answer": letter}) for letter in chosen]
        (path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return path


if __name__ == "__main__":
    print(write_taskset(sys.argv[1] if len(sys.argv) > 1 else "data/letters"))
