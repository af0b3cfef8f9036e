"""Output of commands for people."""
