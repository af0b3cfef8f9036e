"""Third-party environments: installation, the processes that they run in, and the workflows that play them."""
