"""AsyncGRPOTrainer's queue, batcher and collator on our worker, without the trainer, which needs a GPU. JSON in and
out.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from trl.experimental.async_grpo import async_grpo_trainer as theirs

import trinity_es
from trinity_es.integrations.trl_async import AsyncRollouts


def differences() -> list[str]:
    """Methods of the protocols that ours has otherwise."""
    wrong = []
    for protocol in (theirs.RolloutWorkerProtocol, theirs.WeightTransferProtocol):
        for name, method in vars(protocol).items():
            if name.startswith("_") or not callable(method):
                continue
            own, wanted = (list(inspect.signature(f).parameters) for f in (getattr(AsyncRollouts, name, None), method))
            if own != wanted:
                wrong.append(f"{name}{own} is not {wanted}")
    return wrong


class Trainer:
    """The parts of AsyncGRPOTrainer around a worker, in its order."""

    def __init__(self, worker: AsyncRollouts, step: int) -> None:
        self.worker, self.model_version, self.metrics = worker, 0, defaultdict(list)
        self.state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        worker.on_train_begin(None, self.state, None)
        worker.init_weight_transfer()
        self.sync()
        worker.start()
        data = theirs.RolloutQueueDataset(
            rollout_queue=worker.rollout_buffer, model_version_fn=lambda: self.model_version,
            check_health_fn=worker.check_health, stale_after_s=60.0, metrics=self.metrics, max_staleness=6,
            poll_interval_s=0.2)
        self.batches = iter(theirs.FixedCountBatcher(data, num_processes=1, microbatch_size=4))
        self.collate = theirs.DataCollatorForRollout(pad_token_id=0, num_processes=1, metrics=self.metrics)

    def sync(self) -> None:
        import torch

        self.worker.pause()
        self.worker.send_weights(iter([("w", torch.ones(2))]))
        self.worker.resume()
        self.model_version += 1
        self.worker.update_model_version(self.model_version)

    def step(self) -> list[Any]:
        rows = next(self.batches)
        packed = self.collate.torch_call([rows])
        assert packed["input_ids"].shape[0] == 1
        samples = [sample for row in rows for sample in row.samples]
        self.state.global_step += 1
        self.worker.on_step_end(None, self.state, None)
        self.sync()
        return [[s["group_id"], s["input_ids"].tolist(), s["advantage"], int(s["completion_mask"].sum())]
                for s in samples]


def main(given: Any) -> Any:
    PartialState()  # TRL's loggers want it
    config = trinity_es.load_config(given["config"])
    data = Dataset.from_list([{"prompt": f"{i}", "answer": "a"} for i in range(6)])

    def worker() -> AsyncRollouts:
        return AsyncRollouts(
            config, data, batch_size=2, num_generations=2, workflow="single_turn",
            reward_fn="tests.helpers.trl_rewards:vowels", rollout_args={"max_tokens": 4})

    told: dict[str, Any] = {"differences": differences(), "first": [], "second": []}
    trainer = Trainer(first := worker(), 0)
    for _ in range(6):
        told["first"].append(trainer.step())
    first.stop()
    trainer = Trainer(second := worker(), 3)  # back at its checkpoint of step 3
    for _ in range(6):
        told["second"].append(trainer.step())
    told["metrics"] = sorted(trainer.metrics)
    told["arrays"] = [str(getattr(second.rollout_buffer.get(timeout=30), name).dtype)
                      for name in ("input_ids", "completion_mask", "old_log_probs")]
    second.stop()
    try:
        second.check_health(1.0)
    except RuntimeError as e:
        told["stopped"] = str(e)
    return told


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
