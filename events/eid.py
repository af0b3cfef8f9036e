"""Id of an experience, and the values of its `info` that the trainer gets as columns."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from trinity_es.events.errors import DataError

__all__ = ["EID", "CustomField"]


@dataclass(slots=True)
class EID:
    """Id of an experience: batch, task, run, step, and a suffix that makes it unique."""

    batch: int | str = ""
    """Set by the runner."""
    task: int | str = ""
    """Position in the batch; set by the runner."""
    run: int = 0
    """Set by the runner, except for workflows that play all runs themselves."""
    step: int = 0
    """Turn in the run, from 0; set by workflows with several experiences per run."""
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    """Six random hex digits by default. Pass a fixed text for reproducible ids."""

    @property
    def uid(self) -> str:
        """`batch/task/run/step/suffix`, the id of this experience."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """`batch/task/step`, shared by this step of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """`batch/task/run`, shared by all steps of a run."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """`batch/task`, shared by all runs of a task (a GRPO group)."""
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid

    def to_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "task": self.task, "run": self.run, "step": self.step, "suffix": self.suffix}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the EID that `to_dict` wrote. Raises DataError for unknown keys."""
        try:
            return cls(**data)
        except TypeError as e:
            raise DataError(f"{data!r} is not an experience id (EID): {e}") from e


@dataclass(frozen=True, slots=True)
class CustomField:
    """Value of `Experience.info` that the trainer gets as a column of its own."""

    source_field: str
    """Key in `Experience.info`."""
    destination_field: str
    """Name of the trainer's column."""
    data_type: str
    """Name of the column's dtype, such as "float32". A torch or numpy dtype is converted to its name."""

    def __post_init__(self) -> None:
        dtype: Any = self.data_type
        if not isinstance(dtype, str):
            dtype = np.dtype(dtype).name if isinstance(dtype, type | np.dtype) else str(dtype)
        object.__setattr__(self, "data_type", dtype.removeprefix("torch."))
