"""New weights, into every engine."""
