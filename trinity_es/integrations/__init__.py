"""Trainers that people have, on our engines. Each module is imported by who uses it, and needs that trainer's own."""
