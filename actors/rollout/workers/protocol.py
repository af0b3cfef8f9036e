"""Messages between a runner, its template processes, workers and graders.

**Runner and worker**: a stream socket; a message is its length and a pickled tuple. To the worker:
- `import, workflow`: import its module if the template could not; an error shows when it plays
- `run, number, task, batch_id, task_id, runs, models`: play; `models` has name, sampling and version of each
- `answer, number, call number, ok, data, index, version, usage`: result or error of a model's call

To the runner:
- `ready`: it can play
- `imported`: an `import` was tried
- `begun, number`: it has taken the run
- `call, number, call number, index, what, name, arguments`: call a method of model `index`, or of its tokenizer, leases
  or steps
- `done, number, execution, experiences, engine_dead`: the run is over

`number` counts the runs of one worker: messages of an earlier run are dropped. All calls of a model and its tokenizer
go over this socket, and the runner's real `Model` answers: a worker has no engine, tokenizer or torch.

**Runner and grader** (`graders.py`, `grader_main.py`): a stream socket; a message is its length and JSON. One to the
grader: `{"function", "args", "kwargs"}`; one back: `{"value"}`, `{"error"}` as of `error_to_dict`, or `{"raised"}`, a
traceback.

**Runner and template**: a SEQPACKET socket; a message is a pickled tuple. To the template, with the new process's end
of a socket:
- `work, number`: fork a worker
- `grade, number`: fork a grader
- `learn, number, workflow`: fork a child that imports the workflow's module and becomes a template

To the runner:
- `forked, number, pid`, `failed, number, why` (it could not fork), `ended, number, exit status` (minus the signal)
- `ready`: it can fork workers; from a child also `unsafe, why` (the imported module does not survive a fork) and
  `refused, why` (the workflow can't be imported), after which it ends
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

__all__ = ["LENGTH", "MOST", "frame", "note"]

LENGTH = struct.Struct("!Q")

def frame(*message: Any) -> bytes:
    """Return a message between runner and worker: its length and the pickled tuple."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


MOST = 64 * 1024
"""Maximum size of a message to or from a template, in bytes."""


def note(*message: Any) -> bytes:
    """Return a message between runner and template; its texts are cut so that it fits in `MOST`."""
    parts = [part[:4000] if isinstance(part, str) else part for part in message]
    return pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
