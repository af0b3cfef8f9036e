"""The commands of the terminal, one file per command or small group."""
