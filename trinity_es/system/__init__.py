"""The processes of one store: found, started, watched and ended."""
