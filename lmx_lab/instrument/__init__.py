"""Inspect the answers of a lab: recorded requests, replays, branches, and the probabilities of tokens."""

from lmx_lab.instrument.requests import load_requests

__all__ = ["load_requests"]
