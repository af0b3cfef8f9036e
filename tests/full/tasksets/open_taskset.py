"""Opens a taskset for each line of JSON, and writes a line with its source and its tasks, or the error."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.errors import TasksetError
from trinity_es.events.values import task_to_dict
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.taskset import Taskset


def main(given: Any) -> Any:
    recorded = given.get("recorded")
    try:
        taskset = Taskset(
            TasksetConfig.model_validate(given["config"]), recorded=TasksetSource(**recorded) if recorded else None)
    except TasksetError as e:
        return {"error": str(e)}
    tasks = [task_to_dict(taskset.task(row)) for row in range(min(len(taskset), given.get("rows", 100)))]
    assert taskset.source is not None
    return {"source": dataclasses.asdict(taskset.source), "tasks": tasks}


for line in sys.stdin:
    sys.stdout.write("\n" + json.dumps(main(json.loads(line))) + "\n")  # reasoning-gym, too, writes there
    sys.stdout.flush()
