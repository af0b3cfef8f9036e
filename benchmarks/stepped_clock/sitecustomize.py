"""Add to this process's wall clock what a file says, so that a test can step it without touching the machine's.

Python imports this module at the start of every process that has this folder in PYTHONPATH. The file that
STEPPED_CLOCK names holds one double, the seconds to add; it is mapped, so a step is seen at once by every process.
`time.time` and `time.time_ns` are stepped, as code reads them; monotonic clocks are not, as on a real machine.
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
