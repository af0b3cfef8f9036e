"""What is said between a runner, its template processes and its workers.

**Runner and worker**: a socket; a message is its length and a pickled tuple. To the worker:
- `import, workflow`: import its module (where the template could not); whether that went well is told when it plays
- `run, number, task, batch_id, task_id, runs, seen`: play; `seen` is name, sampling and version of each model
- `answer, number, call number, ok, data, index, version, usage`: what a call of a model gave, or its error

To the runner:
- `ready`: it can play
- `imported`: an `import` was tried
- `call, number, call number, index, what, name, arguments`: call a method of the model `index`, of its tokenizer, or
  of its leases
- `done, number, execution, experiences, engine_dead`: the run is over

`number` counts the runs of one worker: what a run that is over still says or is told is thrown away.

Every model call goes over it, the tokenizer's methods and attributes too, and the runner answers from the run's real
`Model` on its event loop: no engine, tokenizer or torch is in the worker.

**Runner and grader** (`graders.py`, `grader_main.py`): a socket; a message is its length and JSON. To the grader, once:
`{"function", "args", "kwargs"}`; back: `{"value"}`, `{"error"}` as of `error_to_dict`, or `{"raised"}`, a traceback.

**Runner and template**: a socket that keeps messages apart; a message is a pickled tuple. To the template, with the end
of a socket that the new process talks over:
- `work, number`: fork a worker
- `grade, number`: fork a grader
- `learn, number, workflow`: fork a child that imports the workflow's module and becomes a template

To the runner:
- `forked, number, pid`, `failed, number, why` (it could not fork), `ended, number, exit status` (minus the signal)
- `ready`: it can fork workers; of a child also `unsafe, why` and `refused, why`: it ends, for workers can't be forked
  of what the module left, or since the workflow can't be imported
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

__all__ = ["LENGTH", "MOST", "frame", "note"]

LENGTH = struct.Struct("!Q")
"""What stands before each message: how many bytes it has."""


def frame(*message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


MOST = 64 * 1024
"""Maximum size of a message to or from a template, in bytes."""


def note(*message: Any) -> bytes:
    told = [part[:4000] if isinstance(part, str) else part for part in message]
    return pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
