"""Workflows that misbehave in a worker, and engines for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import recorded_engine
from tests.helpers.ways_to_end import WAYS
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.events.errors import EngineError, UnknownWorkflow
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine, wait_until
from trinity_es.workflows.workflow import MultiTurnWorkflow, Workflow

HELLO = [{"role": "user", "content": "hello"}]


def one(**metrics: float) -> Experience:
    return Experience(tokens=[1, 2, 3], prompt_length=1, reward=0.5, metrics=metrics)


class LacksAModule(Workflow):
    def run(self) -> list[Experience]:
        raise UnknownWorkflow("reward 'sums:right' can't be imported: no module sums")


class Tells(Workflow):
    def run(self) -> list[Experience]:
        return [one(pid=os.getpid(), main=float(threading.current_thread() is threading.main_thread()))]


class SignalsItsGroup(Workflow):
    """Workflow that signals process groups, as if for its children, and may hit the runner. The signal is harmless."""

    def run(self) -> list[Experience]:
        refused = 0
        for send in (lambda: os.killpg(0, signal.SIGWINCH), lambda: os.kill(0, signal.SIGWINCH),
                     lambda: os.killpg(os.getpgrp(), signal.SIGWINCH), lambda: os.kill(-1, signal.SIGWINCH)):
            with contextlib.suppress(PermissionError):
                send()
                continue
            refused += 1
        os.kill(os.getpid(), signal.SIGWINCH)
        return [one(refused=refused)]


class Chats(Workflow):
    def run(self) -> list[Experience]:
        [experience] = self.model.chat(HELLO, max_tokens=4)
        experience.reward = 1.0
        return [experience]


class ChatsInThreads(Workflow):
    def run(self) -> list[Experience]:
        found: dict[int, Experience] = {}

        def ask(i: int) -> None:
            [found[i]] = self.model.generate(f"prompt {i}", max_tokens=4)
            found[i].reward, found[i].eid.step = 0.0, i

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(found.values())


class ChatsOnALoopOfItsOwn(Workflow):
    def run(self) -> list[Experience]:
        async def both() -> list[Experience]:
            found = await asyncio.gather(self.model.chat_async(HELLO), self.model.chat_async(HELLO))
            return [experience for answers in found for experience in answers]

        experiences = asyncio.run(both())
        for step, experience in enumerate(experiences):
            experience.reward, experience.eid.step = 1.0, step
        return experiences


class Conversation(MultiTurnWorkflow):
    def run(self) -> list[Experience]:
        messages = list(HELLO)
        for _ in range(2):
            [answer] = self.model.chat(messages, max_tokens=3)
            messages += [{"role": "assistant", "content": answer.response_text}, {"role": "user", "content": "on"}]
        whole = self.process_messages_to_experience(messages[:-1], reward=0.25)
        tokenizer = self.model.tokenizer
        assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
        assert tokenizer.name_or_path == "letters"
        assert tokenizer("abc", shout=True) == "ABC"
        assert len(tokenizer) == 256
        assert not hasattr(tokenizer, "nothing")
        each = self.model.extract_experience_from_history(clear_history=False, per_request=True)
        assert [len(e.tokens) - e.prompt_length for e in each] == [3, 3]
        [kept] = self.model.extract_experience_from_history()
        for name in ("tokens", "action_mask", "logprobs"):
            assert getattr(kept, name).tolist() == getattr(whole, name).tolist()
        whole.metrics["requests"] = self.model.usage.requests
        whole.metrics["version"] = self.model.model_version
        return [whole]


class AsksTheJudge(Workflow):
    def run(self) -> list[Experience]:
        [mine] = self.model.generate("x")
        assert list(self.auxiliary) == ["judge"]
        [judged] = self.auxiliary["judge"].generate("x")
        assert [judged.tokens.tolist()] == [e.tokens.tolist() for e in self.auxiliary_model_wrappers[0].generate("x")]
        return [one(mine=len(mine.response_text), judged=len(judged.response_text))]


class KeptWithAJudge(Workflow):
    can_reset = True

    def reset(self, task: Task) -> None:
        self.task = task

    def run(self) -> list[Experience]:
        [judged] = self.auxiliary["judge"].generate("x")
        return [one(requests=self.auxiliary["judge"].usage.requests, judged=len(judged.response_text))]


class Kept(Workflow):
    can_reset = True
    built = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        type(self).built += 1

    def reset(self, task: Task) -> None:
        self.task = task

    def run(self) -> list[Experience]:
        [experience] = self.model.chat(HELLO)
        experience.reward = float(self.task.workflow_args["reward"])
        experience.metrics = {"built": type(self).built, "pid": os.getpid()}
        return [experience]


class Rebuilt(Kept):
    can_reset = False
    built = 0


class Repeats(Workflow):
    can_repeat = True

    def run(self) -> list[Experience]:
        found = [one(at_once=self.repeat_times) for _ in range(self.repeat_times)]
        for i, experience in enumerate(found):
            experience.eid.run = self.run_id_base + i
        return found


class Ends(Workflow):
    """Workflow that ends its process as `workflow_args["how"]` says."""

    def run(self) -> list[Experience]:
        how = self.task.workflow_args["how"]
        if how == "unserialisable":
            experience = one()
            experience.info["object"] = object()
            return [experience]
        if how != "nothing":
            WAYS[how]()
        return []


class EndsBeforeItRuns(Workflow):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        raise SystemExit(4)


class Hangs(Workflow):
    """Workflow that hangs. `workflow_args`: `how`, and `note`, the file for its pids."""

    def run(self) -> list[Experience]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note = Path(self.task.workflow_args["note"])
        note.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
        note.with_suffix(".new").rename(note)
        how = self.task.workflow_args["how"]
        if how == "model":
            self.model.generate("hang")
        WAYS[how]()
        return []


class Waits(Workflow):
    """Workflow that waits for the file `workflow_args["go"]` after its answer."""

    def run(self) -> list[Experience]:
        [experience] = self.model.chat(HELLO)
        experience.reward = 1.0
        go = Path(self.task.workflow_args["go"])
        go.with_suffix(".asked").touch()
        wait_until(go.exists, "to go")
        return [experience]


class LeavesAThread(Workflow):
    """Workflow that leaves a thread, which continues to call the model after the run."""

    def run(self) -> list[Experience]:
        def ask() -> None:
            try:
                while True:
                    self.model.generate("behind its back")
            except Exception as e:
                Path(self.task.workflow_args["note"]).write_text(str(e))

        threading.Thread(target=ask).start()
        time.sleep(0.05)
        return [one(pid=os.getpid())]


class Forks(Workflow):
    """Workflow whose process ends while a forked child keeps the pipe open."""

    def run(self) -> list[Experience]:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os._exit(7)


class CatchesEverything(Workflow):
    is_async = True
    enough = False

    async def run_async(self) -> list[Experience]:
        while not type(self).enough:
            try:
                await asyncio.sleep(600)
            except BaseException:
                continue
        return []


def made() -> type[Workflow]:
    class Made(Tells):
        pass

    return Made


class GivesBadThings(Workflow):
    def run(self) -> list[Experience]:
        errors = []
        calls: list[Callable[[], Any]] = [
            lambda: self.model.generate("x", temprature=1),
            lambda: self.model.generate(threading.Lock()),
            lambda: self.model.tokenizer.encode(5),
            lambda: self.model.tokenizer.odd,
        ]
        for call in calls:
            try:
                call()
            except Exception as e:
                errors.append(type(e).__name__)
        assert self.model.tokenizer
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0, info={"errors": errors})]


NoNameOfItsOwn = made()


class Letters:
    """Part of a tokenizer that the scripted one lacks."""

    name_or_path = "letters"

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def odd(self) -> Any:
        raise ValueError(threading.Lock())  # a lock can't be pickled

    def __call__(self, text: str, shout: bool = False) -> str:
        return text.upper() if shout else text

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> Any:
        return self.inner.encode(text)

    def decode(self, tokens: Any) -> Any:
        return self.inner.decode(tokens)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.apply_chat_template(*args, **kwargs)


class Recorder(recorded_engine.Recorder):
    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.model_version = 3
        self.tokenizer: Any = Letters(self.tokenizer)


class Dead(ScriptedEngine):
    async def generate(self, *_: Any) -> Any:
        raise EngineError("the core is gone", dead=True)


class Odd(ScriptedEngine):
    async def generate(self, *_: Any) -> Any:
        raise asyncio.CancelledError


class Updates(ScriptedEngine):
    """Engine whose weights change with every request."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        found = await super().generate(prompt, sampling)
        self.model_version += 1
        return found
