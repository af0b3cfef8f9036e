"""Messages between a runner, its template processes, workers and graders.

**Runner and worker**: a stream socket; a message is its length and a pickled tuple. To the worker:
- `import, workflow`: import the workflow's module, because the template could not; an error shows at its run
- `run, number, task, batch_id, task_id, runs, models`: execute runs; `models` has name, sampling and version of each
- `answer, number, call number, ok, data, index, version, usage`: result or error of a model's call

To the runner:
- `ready`: the worker can execute runs
- `imported`: the worker has tried an `import`
- `begun, number`: the worker has received the `run` message
- `call, number, call number, index, what, name, arguments`: call a method of model `index`, or of its tokenizer, leases
  or steps
- `done, number, execution, experiences, engine_dead`: the runs are over

`number` counts the `run` messages to one worker (`play_number` in code); messages of an earlier one are dropped. All
calls of a model and its tokenizer go over this socket, and the runner's real `Model` answers them. A worker has no
engine, tokenizer or torch.

**Runner and grader** (`graders.py`, `grader_main.py`): a stream socket; a message is its length and JSON. The grader
gets one message `{"function", "args", "kwargs"}`, and answers with one: `{"value"}`, `{"error"}` as of `error_to_dict`,
or `{"raised"}` with a traceback.

**Runner and template**: a SEQPACKET socket; a message is a pickled tuple. To the template, with the new process's end
of a socket:
- `work, number`: fork a worker
- `grade, number`: fork a grader
- `learn, number, workflow`: fork a child that imports the workflow's module and becomes a template

To the runner:
- `forked, number, pid`; `failed, number, why` (the fork failed); `ended, number, exit status` (minus the signal)
- `ready`: the template can fork workers
- from a child instead of `ready`: `unsafe, why` (the imported module does not survive a fork) or `refused, why` (the
  workflow can't be imported); then the child ends
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
    """Return a message between runner and template, pickled; texts in it are cut so that it fits in `MOST`."""
    parts = [part[:4000] if isinstance(part, str) else part for part in message]
    return pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
