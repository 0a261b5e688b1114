"""A deterministic engine without model files, which repeats the last message or returns the answers of a script.

It has the tokens, slots, deadlines, stop strings, tool calls, enforced schemas, log-probabilities and reports of a real
engine. No model file is read, and no tensor is computed.
"""
