"""What a trainer holds: `RolloutClient`, `RolloutCoordinator`, `Scheduler`, and how they reach a system."""

from trinity_es.client.rollout_client import RolloutClient, connect, running

__all__ = ["RolloutClient", "connect", "running"]
