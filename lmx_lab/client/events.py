"""What GET /admin/events says, typed; what a newer server says, too, without a fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator, TypeAdapter, ValidationError

from lmx_lab.wire.admin import Heartbeat, Memory, ModelEvent, RequestEvent, Sample, Throughput

Include = Literal["models", "requests", "samples"]
"""What is not sent unless one asks: ``ModelEvent``, ``RequestEvent``, ``Sample``."""


@dataclass(frozen=True, kw_only=True)
class UnknownLabEvent:
    """An event of a kind, or in a form, that this version does not know."""

    text: str
    """As it came: JSON, most likely."""


KnownEvent = Throughput | Memory | Heartbeat | ModelEvent | RequestEvent | Sample
LabEvent = KnownEvent | UnknownLabEvent
_KNOWN: TypeAdapter[KnownEvent] = TypeAdapter(Annotated[KnownEvent, Discriminator("type")])


def lab_event(text: str) -> LabEvent:
    """The event whose data this is."""
    try:
        return _KNOWN.validate_json(text)
    except ValidationError:
        return UnknownLabEvent(text=text)
