"""A deterministic simulator: the real actors in one process, under virtual time, with faults from a seed.

`python -m tests.simulation --schedules 1000` runs it; `--bug NAME` inserts a known bug first. Guardian, Coordinator
(with its handlers, fleet and decisions) and Runner are real. Doubles replace the network, processes, clock, database
and engine. A seed gives a schedule of faults, and a schedule always gives the same history.

    world.py      virtual time, processes, messages and their faults
    store.py      the log and the payload store in memory, with the guarantees of `events.store.log`
    machine.py    doubles of os, threads and asyncio
    doubles.py    doubles of Thespian, the log's writer, the pipeline and other threads
    engine.py     the engine and the workflows
    trainer.py    clients that submit, finalize and repeat requests, as `trinity_es/client/connection.py` does
    invariants.py checks after every step
    schedule.py   schedules from seeds, their runs, and the shrinking of failing schedules
    bugs.py       known bugs, to show that the invariants detect them
    many.py       one coordinator with many hosts and a meter of its work (far_hosts.py, metered.py)
"""
