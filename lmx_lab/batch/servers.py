"""Track the servers that answer the rows of a run: their models, which of them accept rows, and their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmx_lab.backend import Backend
from lmx_lab.batch.answer import RowAnswer
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.wire.admin import ModelRecord

DEFAULT_SLOTS = 4
"""Assumed number of slots if the server does not report it."""
WAITING = 2
"""Number of additional requests that wait in a server's queue, so that a slot that becomes free is used immediately."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model that answers rows or computes vectors."""

    id: str
    engine: str
    key: str
    """Identifies the engine and the weights in the keys of the cache."""
    slots: int
    description: str
    """The model's id, quantization, size and engine."""
    weights: str
    """SHA-256 of its files; empty if the hash is not known."""

    def is_same(self, other: LoadedModel) -> bool:
        """Return whether both are the same model on the same engine, as far as their hashes are known."""
        is_other = self.weights and other.weights and self.weights != other.weights
        return self.description == other.description and not is_other


async def loaded_model(backend: Backend, *, hashed: bool) -> LoadedModel:
    """Return the loaded chat model.

    Args:
        hashed: Whether to hash the model's files for the key, if they are on this machine.

    Raises:
        NotLoadedError: no chat model is loaded.
    """
    records = (await backend.models()).models
    record = next((each for each in records if each.loaded and not each.pinned and each.kind == "chat"), None)
    if record is None:
        raise NotLoadedError(f"no chat model is loaded at {backend.state().url}; load one first: lab.load(...)")
    return await identify(backend, record, hashed=hashed)


async def identify(backend: Backend, record: ModelRecord, *, hashed: bool) -> LoadedModel:
    """Return a model with its cache key. ``hashed`` is that of ``loaded_model``."""
    weights = await backend.weights_of(record.id) if hashed else ""
    named = f"{record.id} {record.quantization} {record.size_gb}"
    size = ", ".join(filter(None, (record.quantization, f"{record.size_gb:g} GB")))
    return LoadedModel(
        id=record.id,
        engine=record.engine or "",
        key=f"{record.engine} {weights or named}",
        slots=record.slots or DEFAULT_SLOTS,
        description=f"{record.id} ({size}) on the engine {record.engine}",
        weights=weights,
    )


class RowServer:
    """A server that answers rows.

    Args:
        slots: Number of requests that the server decodes at the same time.
    """

    def __init__(self, backend: Backend, slots: int) -> None:
        self.backend = backend
        self.url = backend.state().url
        self.running = 0
        """Number of rows that the server is answering."""
        self.returned = 0
        """Number of rows that the server could not answer, and that other servers got instead."""
        self.error = ""
        """The reason why the server gets no rows at present; empty if it gets rows."""
        self.has_failed = False
        """Whether the server has had such an error during the run."""
        self._slots = slots
        self._answers = 0
        self._output_tokens = 0
        self._started_at: float | None = None
        self._answered_at = 0.0

    @property
    def occupancy(self) -> float:
        """The fraction of the slots in use; above 1 if requests wait in the queue."""
        return self.running / self._slots

    @property
    def has_room(self) -> bool:
        return not self.error and self.running < self._slots + WAITING

    def begin(self) -> None:
        """Count a row that the server starts to answer."""
        self._started_at = self._started_at or time.monotonic()
        self.running += 1

    def count(self, answer: RowAnswer) -> None:
        """Count an answer."""
        self._answers += 1
        self._output_tokens += answer.output_tokens or 0
        self._answered_at = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """Return the statistics of the server as a row of a table."""
        elapsed_s = self._answered_at - self._started_at if self._answers and self._started_at else 0.0
        return {
            "url": self.url,
            "slots": self._slots,
            "answers": self._answers,
            "output_tokens": self._output_tokens,
            "tokens_per_s": self._output_tokens / elapsed_s if elapsed_s else 0.0,
            "returned": self.returned,
            "error": self.error,
        }


def next_server(servers: Sequence[RowServer]) -> RowServer | None:
    """Return the server that gets the next row, the one with the lowest occupancy; None if none of them has room."""
    return min((each for each in servers if each.has_room), key=lambda each: each.occupancy, default=None)


async def same_models(backends: Sequence[Backend], *, hashed: bool) -> tuple[LoadedModel, list[RowServer]]:
    """Return the model of the first server, and the other servers, which must have the same model.

    Raises:
        NotLoadedError: one of the servers has no chat model loaded.
        InvalidRequestError: the servers have different models.
    """
    models = [await loaded_model(each, hashed=hashed) for each in backends]
    for backend, model in zip(backends, models, strict=True):
        if not model.is_same(models[0]):
            first, other = (f"{each.description} {each.weights[:12]}".rstrip() for each in (models[0], model))
            raise InvalidRequestError(
                f"the labs have different models: {first} at {backends[0].state().url}, and {other} at "
                f"{backend.state().url}; load the same model on the same engine in all of them",
                param="labs",
            )
    others = zip(backends[1:], models[1:], strict=True)
    return models[0], [RowServer(backend, model.slots) for backend, model in others]
