"""The clients of a running system: `RolloutClient`, `RolloutCoordinator`, `Scheduler`, and their connection to it.

This module imports nothing, because `trinity-es why` uses `health.py` on machines without Thespian too.
"""
