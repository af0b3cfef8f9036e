"""The clients of a running system: `RolloutClient`, `RolloutCoordinator`, `Scheduler`, and their connection to it.

Nothing is imported here, because `trinity-es why` uses `health.py` also where Thespian is not installed.
"""
