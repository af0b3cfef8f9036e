"""What happened: the vocabulary of facts, their encoding, the log that keeps them and the store of their payloads.

The lowest room: it imports no other, and neither torch, vLLM nor Thespian. Import the module you need (`store.log`,
`store.payloads`, `vocabulary`, ...); this file imports nothing, so that the cheap ones stay cheap.
"""
