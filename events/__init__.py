"""Events, their encoding, the log and the payload store. No module here imports `projections`, `actors`, `trinity_es`,
torch, vLLM or Thespian.

This file imports nothing, so that the import of a single module stays cheap.
"""
