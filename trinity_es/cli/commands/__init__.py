"""The commands of the terminal: a file for each, or for a few that belong together."""
