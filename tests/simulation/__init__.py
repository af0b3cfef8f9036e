"""A deterministic simulator: the real actors in one process, under virtual time, with faults from a seed.

`python -m tests.simulation --schedules 1000` runs it; `--bug NAME` puts a known bug in first. Real are Guardian,
Coordinator (with its handlers, Crew, Book and decisions) and Runner; doubles stand for what is under them: the network,
the processes, the clock, the database, the engine. One seed is one schedule, and the same schedule is the same history.

    world.py      virtual time, processes, messages, faults: what exists outside the actors
    store.py      the log and the payload store, in memory, with the promises of `events.store.log`
    machine.py    what the actors use of os, threads and asyncio
    doubles.py    the rest of the actors' ground: Thespian, the log's writer, the pipeline, the engine
    trainer.py    clients that submit, finalize and ask again, as `trinity_es/client/connection.py` does
    invariants.py what must hold after every step
    schedule.py   schedules from seeds, their runs, and the shrinking of those that fail
    bugs.py       known bugs, to show that the invariants see them
"""
