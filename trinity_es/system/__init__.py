"""The processes of one store's system: found, started, watched and ended."""
