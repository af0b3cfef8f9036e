"""What a recorded run could have been under another config: its history, a simulation, a forecast."""
