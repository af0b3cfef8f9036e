"""Stand-ins for a trainer and a system for the TRL adapter, which record their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trinity_es.events.errors import BatchNotFound
from trinity_es.events.experience import EID, Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.values import BatchLifecycleState, Status, Task, task_to_dict
from trinity_es.events.vocabulary import WeightsPublished

EOS = 99


def answer(task: int, run: int, *, step: int = 0, reward: float | None = 1.0, **more: Any) -> Experience:
    given: dict[str, Any] = {"tokens": [1, 2, 10 + task, 20 + run], "prompt_length": 2, "logprobs": [-0.5, -0.25]}
    return Experience(
        eid=EID(task=task, run=run, step=step), reward=reward, info={"model_version": 3}, **{**given, **more})


class StandInClient:
    """Client of a system that answers at once. `failing`: runs (batch, task, run) that fail for good."""

    def __init__(self, failing: Any = ()) -> None:
        self.submitted: dict[str, list[dict[str, Any]]] = {}
        self.generated: list[str] = []
        self.acknowledged: list[tuple[str, int]] = []
        self.synced: list[int] = []
        self.failing = set(failing)
        self.failed: dict[str, Any] = {}
        self.finalized: set[str] = set()
        self.state: dict[str, BatchLifecycleState] = {}
        self.extra: list[Experience] = []
        self.weights = WeightsPublished(version=0, path="")
        self.log = self

    # the log
    def current(self, batch_id: str) -> Any:
        if batch_id not in self.submitted:
            return None
        tasks = self.submitted[batch_id]
        runs = [[r for r in range(t.get("repeat_times", 1)) if (batch_id, n, r) not in self.failed[batch_id]]
                for n, t in enumerate(tasks)]
        statuses = {
            n: Status(completed_runs=len(done), total_runs=tasks[n].get("repeat_times", 1), message=(
                None if len(done) == tasks[n].get("repeat_times", 1) else "First error: the sandbox is gone"))
            for n, done in enumerate(runs)}
        state = self.state.get(batch_id, BatchLifecycleState.RUNNING)
        return SimpleNamespace(
            state=state, statuses=statuses, tasks=[SimpleNamespace(done=done, payloads=[n])
                                                   for n, done in enumerate(runs)],
            failed_whole=state is BatchLifecycleState.FINALIZED and not any(runs),
            ready_tasks=lambda: [] if state.ended else list(range(len(tasks))))

    def batch(self, batch_id: str) -> Any:
        if (state := self.current(batch_id)) is None:
            raise BatchNotFound(batch_id)
        return state

    def submission_events(self, batch_id: str) -> list[str]:
        return [batch_id]

    def tasks_of(self, batch_id: str) -> list[dict[str, Any]]:
        return self.submitted[batch_id]

    def last(self, stream: str, type_name: str) -> Any:
        return SimpleNamespace(event=self.weights)

    def read(self, refs: Any = None) -> Any:
        return ExperienceColumns.of(self._experiences(self.asked))

    # the system
    def pack(self, tasks: list[Task]) -> list[Task]:
        return tasks

    def submit_batch(self, *, batch_id: str, tasks: list[Task], batch_type: str) -> None:
        assert batch_type == "train"
        self._play(batch_id, tasks)

    def _play(self, batch_id: str, tasks: list[Task]) -> None:
        self.submitted[batch_id] = [task_to_dict(task) for task in tasks]
        self.state.pop(batch_id, None)
        self.failed[batch_id] = set(self.failing)
        self.generated.append(batch_id)

    def finalize_train_batch(self, batch_id: str, *, timeout: float) -> None:
        self.state[batch_id] = BatchLifecycleState.FINALIZED

    def request(self, command: Any) -> Any:
        match command.name:
            case "schedule":
                self._play(command.batch_id, command.tasks)
            case "poll":
                self.asked = command.batch_id
                return {"open": 0, "submission": "s"}
            case "take":
                self.state[command.batch_id] = BatchLifecycleState.FINALIZED
        return None

    def columns(self, batch_id: str) -> ExperienceColumns:
        return ExperienceColumns.of([*self._experiences(batch_id), *self.extra])

    def _experiences(self, batch_id: str) -> list[Experience]:
        state = self.current(batch_id)
        return [answer(n, run) for n, task in enumerate(state.tasks) for run in reversed(task.done)]

    def sync_weights(self, version: int, weights: Any) -> None:
        self.synced.append(version)
        self.weights = WeightsPublished(version=version, path="/")

    def acknowledge(self, batch_id: str, step: int) -> None:
        self.acknowledged.append((batch_id, step))

    def close(self) -> None: ...


class StandInTrainer:
    """Trainer with the methods of a single-process GRPOTrainer that `Rollouts` uses."""

    def __init__(
        self, rows: list[dict[str, Any]], *, group: int = 2, step: int = 0, reward_funcs: Any = (), **args: Any
    ) -> None:
        self.use_vllm, self._step = False, 0
        self.model = self.model_wrapped = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            is_main_process=True, num_processes=1, process_index=0, unwrap_model=lambda model: model,
            get_state_dict=lambda model: {"w": 1})
        self.state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        self.processing_class = SimpleNamespace(eos_token_id=EOS)
        self.num_generations = self.num_generations_eval = group
        self.train_dataset = self.eval_dataset = Rows(rows)
        self.callback_handler = SimpleNamespace(eval_dataloader=None)
        self.reward_funcs = list(reward_funcs)
        sampling = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
                    "max_completion_length": 8, "generation_kwargs": None, "chat_template_kwargs": None}
        steps = {"steps_per_generation": 1, "num_iterations": 1, "gradient_accumulation_steps": 1, "save_steps": 1,
                 "save_strategy": "steps"}
        self.args = SimpleNamespace(**{**sampling, **steps, **args})

    def end_step(self, callback: Any) -> None:
        """End a step: call the callback as the trainer does."""
        self._step += self.args.gradient_accumulation_steps
        self.state.global_step += 1
        callback.on_step_end(self.args, self.state, None)


class Rows:
    """Dataset with the methods of `datasets.Dataset` that the adapter uses."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        return self.rows[key] if isinstance(key, int) else [row[key] for row in self.rows]
