"""What /openapi.json says beyond what FastAPI finds out by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lmx_lab.wire.admin import Heartbeat, Memory, ModelEvent, RequestEvent, Sample, Throughput
from lmx_lab.wire.chat import ChatChunk
from lmx_lab.wire.completions import Completion

EVENTS: tuple[type[BaseModel], ...] = (Throughput, Memory, Heartbeat, ModelEvent, RequestEvent, Sample)
STREAMED: tuple[type[BaseModel], ...] = (ChatChunk, Completion, *EVENTS)
PLACE = "#/components/schemas/{model}"


class DescribedAPI(FastAPI):
    """With the schemas of server-sent events, which are no response models: FastAPI does not know them."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        _, streamed = models_json_schema([(model, "serialization") for model in STREAMED], ref_template=PLACE)
        schemas = described["components"]["schemas"]
        described["components"]["schemas"] = {**streamed["$defs"], **schemas}
        return described


def event_stream(*models: type[BaseModel], description: str) -> dict[str, Any]:
    """A response that is, or with ``stream: true`` may be, ``data:`` lines of these models."""
    places = [{"$ref": PLACE.format(model=model.__name__)} for model in models]
    schema = places[0] if len(places) == 1 else {"oneOf": places}
    return {"content": {"text/event-stream": {"schema": schema}}, "description": description}
