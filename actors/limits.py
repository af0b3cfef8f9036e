"""Limits that both the guardian and those who read its status go by."""

__all__ = ["RESTARTS"]

RESTARTS = 3
"""Times that a child may end in the guardian's period and is started again."""
