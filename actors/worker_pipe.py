"""The pipe between a runner and a worker process: a socket; a message is its length and a pickled tuple.

To the worker:
- `import, workflow`: import its module; whether that went well is told when it plays
- `run, number, task, batch_id, task_id, runs, seen`: play; `seen` is name, sampling and version of each model
- `answer, number, call number, ok, data, index, version, usage`: what a call of a model gave, or its error

To the runner:
- `ready`: it can play
- `imported`: an `import` was tried
- `call, number, call number, index, what, name, arguments`: call a method of the model `index`, or of its tokenizer
- `done, number, execution, experiences, engine_dead`: the run is over

`number` counts the runs of one worker: what a run that is over still says or is told is thrown away.

Every model call goes over it, the tokenizer's methods and attributes too, and the runner answers from the run's real
`Model` on its event loop: no engine, tokenizer or torch is in the worker.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

__all__ = ["LENGTH", "frame"]

LENGTH = struct.Struct("!Q")
"""What stands before each message: how many bytes it has."""


def frame(*message: Any) -> bytes:
    """A message as it goes over the pipe."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data
