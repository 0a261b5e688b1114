"""Inspect the answers of a lab: recorded requests, replays, branches, and the probabilities of tokens."""

from lmx_lab.instrument.branches import AnswerTree, Branch, BranchDiff
from lmx_lab.instrument.compare import Comparison
from lmx_lab.instrument.lens import TokenLens
from lmx_lab.instrument.requests import RecordedRequest, Replay, RequestList, load_requests
from lmx_lab.instrument.steering import Steer
from lmx_lab.instrument.timeline import Timeline

__all__ = [
    "AnswerTree",
    "Branch",
    "BranchDiff",
    "Comparison",
    "RecordedRequest",
    "Replay",
    "Steer",
    "RequestList",
    "Timeline",
    "TokenLens",
    "load_requests",
]
