"""A whole run: the loops of explorer and trainer, and what they share."""
