"""What a trainer holds: `RolloutClient`, `RolloutCoordinator`, `Scheduler`, and how they reach a system.

Nothing is imported here: `trinity-es why` reads `health.py` where no actor system is installed.
"""
