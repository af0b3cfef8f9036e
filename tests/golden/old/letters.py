"""What the configs of these logs name: rewards, and a trainer whose weights are a hash of all that it learnt."""

# mypy: ignore-errors
import hashlib
import json
from pathlib import Path


def early(response, prompt="", truth=None):
    return sum(c < "m" for c in response) / max(1, len(response))


class Trainer:
    def __init__(self, model_path):
        self.weights, self.steps = "new", 0

    def load(self, path):
        self.weights, self.steps = json.loads((Path(path) / "state.json").read_text())

    def step(self, experiences):
        learnt = hashlib.sha256(self.weights.encode())
        for e in experiences:
            learnt.update(e.tokens.tobytes() + f"{e.eid.rid} {e.reward} {e.advantages}".encode())
        self.weights, self.steps = learnt.hexdigest(), self.steps + 1
        return {"loss": 1.0 / self.steps}

    def save(self, path):
        Path(path).mkdir(parents=True)
        (Path(path) / "state.json").write_text(json.dumps([self.weights, self.steps]))
