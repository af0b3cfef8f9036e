"""The lowest room: events, their encoding, the log, and the payload store. It imports no other room, nor torch, vLLM or
Thespian.

Import the module that you need; this file imports nothing, so that each import stays cheap.
"""
