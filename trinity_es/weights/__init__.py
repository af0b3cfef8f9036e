"""Publishing new weights to the engines, and reading the current ones."""
