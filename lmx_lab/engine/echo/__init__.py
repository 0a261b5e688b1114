"""A deterministic engine without model files: it repeats the last message, or gives the answers of a script.

Tokens, slots, deadlines, stop strings, tool calls, enforced schemas, log-probabilities and reports are those of a real
engine. Nothing is read from disk, and no tensor is computed.
"""
