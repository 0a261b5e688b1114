"""Inspect the answers of a lab: recorded requests, replays, branches, and the probabilities of tokens."""

from lmx_lab.instrument.comparison import Comparison
from lmx_lab.instrument.lens import TokenLens
from lmx_lab.instrument.replay import Replay
from lmx_lab.instrument.requests import RecordedRequest, RequestList, load_requests
from lmx_lab.instrument.steering import Steer
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.instrument.tree import AnswerTree, Branch, BranchDiff

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
