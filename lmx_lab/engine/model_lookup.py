"""Which model in memory a request means, and what to say if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lmx_lab.errors import (
    EngineDeadError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OtherModelLoadedError,
    OutOfMemoryError,
)
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import KINDS_IN_WORDS, Kind, ModelEntry

if TYPE_CHECKING:
    # They import MLX.
    from lmx_lab.engine.encoders import LoadedEncoder
    from lmx_lab.engine.mlx.model import LoadedModel
    from lmx_lab.engine.mlx.thread import EngineThread

EMBEDDERS: tuple[Kind, ...] = ("embedding",)
RERANKERS: tuple[Kind, ...] = ("rerank", "embedding")
"""Kinds that can rank, the first ones preferred."""
LOAD_FIRST = "load one first: POST /admin/models/load, lab.load(...) or lmx-lab serve --model"
REMEDIES: dict[Kind, str] = {
    "chat": LOAD_FIRST,
    "embedding": "load one (POST /admin/models/load, lab.load), or keep one beside it: lmx-lab serve --embedder ID, "
    "launch(embedder=ID)",
    "rerank": "load one (POST /admin/models/load, lab.load), or keep one beside it: lmx-lab serve --reranker ID or "
    "--embedder ID, launch(reranker=ID)",
}


def chat_model(thread: EngineThread, name: str | None) -> LoadedModel:
    """The chat model that is loaded.

    Raises:
        NotLoadedError, OutOfMemoryError, EngineDeadError: there is none, and why.
        InvalidRequestError: the name is that of a model of another kind.
    """
    main = _main(thread)
    if main is not None and main.entry.kind == "chat" and name in (None, main.entry.id):
        return cast("LoadedModel", main)
    raise refusal(thread.snapshot, name, ("chat",))


def encoder(thread: EngineThread, name: str | None, kinds: tuple[Kind, ...]) -> LoadedEncoder:
    """A model of one of these kinds, the first ones preferred, and of the same kind the pinned one.

    Raises: as ``chat_model``.
    """
    _main(thread)
    there = thread.core.encoders() if thread.core else []
    for kind in kinds:
        for found in there:
            if found.entry.kind == kind and name in (None, found.entry.id):
                return found
    raise refusal(thread.snapshot, name, kinds)


def fitting(now: EngineSnapshot, name: str | None, kinds: tuple[Kind, ...]) -> ModelEntry | None:
    """The model in memory that such a request means, found as above."""
    there = [*(pinned.entry for pinned in now.pinned), *([now.entry] if now.entry is not None else [])]
    for kind in kinds:
        for entry in there:
            if kind in entry.kinds and name in (None, entry.id):
                return entry
    return None


def refusal(now: EngineSnapshot, name: str | None, kinds: tuple[Kind, ...]) -> LabError:
    """Why nothing in memory fits, and what to do."""
    main = now.entry
    if main is not None and main.answers(kinds) and name in (None, main.id):
        # It was there a moment ago, and the snapshot has not been told yet.
        return NotLoadedError(f"{main.id} is being unloaded; {LOAD_FIRST}")
    there = [*(pinned.entry for pinned in now.pinned), *([main] if main is not None else [])]
    if (other := _other_kind(there, name, kinds)) is not None:
        return other
    encoders = [entry for entry in there if entry.kind != "chat"]
    if main is None and (kinds == ("chat",) or (not encoders and name is None and now.state == "loading")):
        return _none_loaded(now)
    if name is not None:
        named = encoders if encoders and kinds != ("chat",) else [main] if main is not None else []
        return _other(name, ", ".join(entry.id for entry in named) or "none", kinds[0])
    if kinds == ("chat",):
        assert main is not None
        return NotLoadedError(f"{main.id} is {KINDS_IN_WORDS[main.kind]} and does not chat; {LOAD_FIRST}")
    loaded = f"{main.id} is {KINDS_IN_WORDS[main.kind]}, and no" if main is not None else "no"
    needed = " or ".join(KINDS_IN_WORDS[kind].partition(" ")[2] for kind in kinds)
    return NotLoadedError(f"{loaded} {needed} is in memory; {REMEDIES[kinds[0]]}")


def _main(thread: EngineThread) -> LoadedModel | LoadedEncoder | None:
    if thread.dead is not None:
        raise EngineDeadError(f"the engine has died ({thread.dead!r}); load a model to start it again")
    return thread.core.main if thread.core else None


def _other_kind(there: list[ModelEntry], name: str | None, kinds: tuple[Kind, ...]) -> LabError | None:
    for entry in there:
        if entry.id == name and not entry.answers(kinds):
            needed = " or ".join(KINDS_IN_WORDS[kind] for kind in kinds)
            others = [other.id for other in there if other.answers(kinds)]
            rest = f"{', '.join(others)} is in memory" if others else "GET /admin/models lists what is here by kind"
            return InvalidRequestError(
                f"{name} is {KINDS_IN_WORDS[entry.kind]}; this needs {needed}: {rest}", param="model"
            )
    return None


def _other(name: str, loaded: str, kind: Kind) -> LabError:
    return OtherModelLoadedError(f"{name[:200]} is not loaded, {loaded} is; {REMEDIES[kind]}", param="model")


def _none_loaded(now: EngineSnapshot) -> LabError:
    """Why no model is loaded."""
    if now.state == "loading":
        return NotLoadedError("a model is being loaded; ask again when GET /readyz says 200", retry_after_s=1)
    if now.unload_cause == "memory":
        return OutOfMemoryError(
            f"{now.unloaded_model} was unloaded for lack of memory; load it again, or a smaller one"
        )
    if now.unload_cause == "idle":
        return NotLoadedError(f"{now.unloaded_model} was unloaded after a time without use; {LOAD_FIRST}")
    return NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
