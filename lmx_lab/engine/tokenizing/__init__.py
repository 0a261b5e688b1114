"""Encode texts with the tokenizers of models, within limits on time and memory."""
