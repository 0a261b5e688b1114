"""Pydantic models of a server's timeline: what its engines did for requests, and when models were loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel

from lmx_lab.values.models import LoadStage
from lmx_lab.values.timeline import (
    FIELDS,
    KINDS,
    ModelStage,
    ModelTimeline,
    RequestTimeline,
    decode_steps,
    encode_steps,
)

PAGE_REQUESTS = 64
"""Maximum number of requests on a page."""


def _check_columns(columns: list[list[int]]) -> list[list[int]]:
    if columns and len(columns) < FIELDS:
        raise ValueError(f"has {len(columns)} columns; there must be at least {FIELDS}")
    if len({len(column) for column in columns}) > 1:
        raise ValueError("has columns of different lengths")
    if columns and not all(0 <= kind < len(KINDS) for kind in columns[0]):
        raise ValueError(f"has an unknown kind of step; the kinds are 0 to {len(KINDS) - 1}")
    return columns


StepColumns = Annotated[list[list[int]], AfterValidator(_check_columns)]


class TimelineRequest(BaseModel):
    """A request. Times are in seconds."""

    request_id: str
    """Id of the request in the log; empty for requests of the server's own notebook."""
    index: int
    """Index of the answer among those to the request."""
    model: str
    at: float
    """Unix time of the arrival."""
    outcome: str
    """``running``, ``stop``, ``length``, ``tool_calls``, ``cancelled`` or ``error``."""
    code: str | None
    """Code of the error; null if there was none."""
    stop_string: bool
    """Whether a stop string ended the answer."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    steps: StepColumns
    """Columns with one number for each step: its kind (0 is ``queued``, 1 ``prefill``, 2 ``decode``, 3 ``paused``), its
    beginning in microseconds since the arrival, its duration in microseconds, its number of tokens, the number of the
    engine's step, the number of requests that had a slot, and the bytes of their KV caches."""


class TimelineStage(BaseModel):
    """A stage of a load or unload."""

    name: LoadStage
    start_s: float
    """Seconds since the beginning of the load or unload."""
    duration_s: float


class TimelineModel(BaseModel):
    """A load or unload."""

    kind: Literal["load", "unload"]
    model: str
    at: float
    """Unix time of the beginning."""
    outcome: Literal["running", "loaded", "unloaded", "failed"]
    message: str
    """Why a load failed, or why a model was unloaded without a request to do so."""
    total_s: float
    stages: list[TimelineStage]


class TimelinePage(BaseModel):
    """The answer of GET /admin/timeline."""

    requests: list[TimelineRequest]
    """The newest first."""
    models: list[TimelineModel]
    """Loads and unloads, oldest first. Only the first page has them."""
    before: int | None
    """Value of ``before`` for the next page; null on the last page."""

    @classmethod
    def of(cls, requests: Iterable[RequestTimeline], models: Iterable[ModelTimeline], *, before: int | None) -> Self:
        """Return a page with these requests, loads and unloads."""
        return cls(
            requests=[TimelineRequest(**{**vars(each), "steps": encode_steps(each.steps)}) for each in requests],
            models=[
                TimelineModel(**{**vars(each), "stages": [TimelineStage(**stage._asdict()) for stage in each.stages]})
                for each in models
            ],
            before=before,
        )

    def request_timelines(self) -> list[RequestTimeline]:
        """Return the requests of the page."""
        return [RequestTimeline(**{**dict(each), "steps": decode_steps(each.steps[:FIELDS])}) for each in self.requests]

    def model_timelines(self) -> list[ModelTimeline]:
        """Return the loads and unloads of the page."""
        return [
            ModelTimeline(**{**dict(each), "stages": tuple([ModelStage(**dict(stage)) for stage in each.stages])})
            for each in self.models
        ]
