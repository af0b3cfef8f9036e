"""Environments of others: where they are installed, the processes that they run in, the workflows that play them."""
