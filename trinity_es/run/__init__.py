"""The loops of explorer and trainer, and the code that they share."""
