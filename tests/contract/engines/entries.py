"""Settings of the engines under test, and entries of their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, Kind, ModelEntry

CONTEXT = 8192
SETTINGS = Settings(slots=8, queue_limit=8, threads=1, memory_limit_bytes=2**30, echo_tokens_per_s=20_000)
FEW = replace(SETTINGS, slots=2, queue_limit=2, echo_tokens_per_s=2000)


def echo_entry(id_: str, *, context: int = 512, kind: Kind = "chat") -> ModelEntry:
    """Return an entry of the echo engine with the id of a model."""
    return replace(ECHO, id=id_, path=Path("echo") / id_, context_length=context, kind=kind, more_kinds=())
