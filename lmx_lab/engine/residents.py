"""Describe the models in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lmx_lab.engine.admission import AdmissionControl
from lmx_lab.engine.interface import InferenceEngine
from lmx_lab.engine.model_lookup import Kinds, entries_in_memory, find_model, loaded_id
from lmx_lab.values.engine import ModelChange, UnloadCause
from lmx_lab.values.models import LoadSpec, ModelEntry

MAIN = "main"
"""The slot of the main model. The other slots have the names of kinds and hold the pinned models."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Resident:
    """A model in memory."""

    entry: ModelEntry
    spec: LoadSpec
    engine: InferenceEngine
    admission: AdmissionControl

    @property
    def in_memory(self) -> bool:
        """Whether the engine still has the model: the engine may have run out of memory, or died."""
        return any(entry is self.entry for entry in entries_in_memory(self.engine.snapshot))

    @property
    def memory_bytes(self) -> int:
        """Memory of the model; 0 if the engine has lost it."""
        now = self.engine.snapshot
        if now.entry is self.entry:
            return now.model_memory_bytes
        return next((model.memory_bytes for model in now.pinned if model.entry is self.entry), 0)

    @property
    def slot_free_s(self) -> float:
        """Estimated seconds until a running request of the model ends; 1 if it is not the main model."""
        now = self.engine.snapshot
        return now.slot_free_s if now.entry is self.entry else 1.0


@dataclass(frozen=True, kw_only=True)
class Residents:
    """The models in memory at one moment. A new object replaces it after each change."""

    main: Resident | None = None
    pinned: tuple[Resident, ...] = ()
    stable: bool = True
    """Whether the main model stays: no load or unload is under way, and no request waits for another model."""
    engine: InferenceEngine | None = None
    """The engine of the main model, or of the last one."""
    change: ModelChange | None = None
    unloaded: tuple[str, UnloadCause] | None = None
    """The model that was unloaded last, and why."""

    def __iter__(self) -> Iterator[Resident]:
        """Iterate over the pinned models, then the main one."""
        yield from self.pinned
        if self.main is not None:
            yield self.main

    def find(self, name: str | None, kinds: Kinds, *, local: bool) -> Resident | None:
        """Return the model that answers a request; None if there is none. See ``ModelManager.model_for``."""
        residents = list(self)
        entries = [resident.entry for resident in residents]
        entry = find_model(entries, loaded_id(name, entries, local=local), kinds)
        return next((resident for resident in residents if resident.entry is entry), None)


def staying_bytes(slots: Mapping[str, Resident], entry: ModelEntry, spec: LoadSpec, engine: InferenceEngine) -> int:
    """Return the memory of the models that stay when this one is loaded. An engine reads the same files once."""
    others = [it for slot, it in slots.items() if slot != (spec.pin or MAIN) and it.entry.path != entry.path]
    return sum(it.memory_bytes for it in others if share_memory(engine, it.engine))


def share_memory(engine: InferenceEngine, other: InferenceEngine) -> bool:
    """Return whether the models of two engines use the same memory. Models of MLX may be in the memory of a GPU."""
    return engine is other or not (engine.snapshot.memory_is_of_device or other.snapshot.memory_is_of_device)
