"""Forecast of a recorded run under another config: its history, a simulation, and a prediction."""
