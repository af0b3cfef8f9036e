"""Add an offset from a file to this process's wall clock, so that a test can step the clock of its processes alone.

Python imports this module at the start of every process that has this folder in PYTHONPATH. The file that
STEPPED_CLOCK names holds one double, the seconds to add. It is mapped, so every process sees a step at once. Only
`time.time` and `time.time_ns` have the offset; monotonic clocks have none, as on a real machine.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("STEPPED_CLOCK")
if _path and os.path.exists(_path):
    with open(_path, "rb") as _file:
        _offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _time, _time_ns = time.time, time.time_ns

    def _stepped() -> float:
        return _time() + struct.unpack_from("d", _offset)[0]

    def _stepped_ns() -> int:
        return _time_ns() + int(struct.unpack_from("d", _offset)[0] * 1e9)

    time.time, time.time_ns = _stepped, _stepped_ns
