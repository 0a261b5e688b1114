"""Which model in memory a request means, and what to say if there is none."""

from __future__ import annotations

from lmx_lab.engine.encoders import LoadedEncoder
from lmx_lab.engine.loaded import LoadedModel
from lmx_lab.engine.requests import EngineSnapshot
from lmx_lab.engine.thread import EngineThread
from lmx_lab.errors import (
    EngineDeadError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OtherModelLoadedError,
    OutOfMemoryError,
)
from lmx_lab.weights import KINDS_IN_WORDS, Kind

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
    if isinstance(main, LoadedModel) and name in (None, main.entry.id):
        return main
    _refuse_other_kinds(thread, name, ("chat",))
    if main is None:
        raise _none_loaded(thread.snapshot)
    if name is None:
        raise NotLoadedError(f"{main.entry.id} is {KINDS_IN_WORDS[main.entry.kind]} and does not chat; {LOAD_FIRST}")
    raise _other(name, main.entry.id, "chat")


def encoder(thread: EngineThread, name: str | None, kinds: tuple[Kind, ...]) -> LoadedEncoder:
    """A model of one of these kinds, the first ones preferred, and of the same kind the pinned one.

    Raises: as ``chat_model``.
    """
    main = _main(thread)
    core = thread.core
    there = core.encoders() if core else []
    for kind in kinds:
        for found in there:
            if found.entry.kind == kind and name in (None, found.entry.id):
                return found
    _refuse_other_kinds(thread, name, kinds)
    if name is not None:
        loaded = ", ".join(found.entry.id for found in there) or (main.entry.id if main else "none")
        raise _other(name, loaded, kinds[0])
    if main is None and not there and thread.snapshot.state == "loading":
        raise _none_loaded(thread.snapshot)
    loaded = f"{main.entry.id} is {KINDS_IN_WORDS[main.entry.kind]}, and no" if main is not None else "no"
    needed = " or ".join(KINDS_IN_WORDS[kind].partition(" ")[2] for kind in kinds)
    raise NotLoadedError(f"{loaded} {needed} is in memory; {REMEDIES[kinds[0]]}")


def _main(thread: EngineThread) -> LoadedModel | LoadedEncoder | None:
    if thread.dead is not None:
        raise EngineDeadError(f"the engine has died ({thread.dead!r}); load a model to start it again")
    return thread.core.main if thread.core else None


def _refuse_other_kinds(thread: EngineThread, name: str | None, kinds: tuple[Kind, ...]) -> None:
    now = thread.snapshot
    entries = [now.entry, *(pinned.entry for pinned in now.pinned)]
    for entry in entries:
        if entry is not None and entry.id == name and entry.kind not in kinds:
            needed = " or ".join(KINDS_IN_WORDS[kind] for kind in kinds)
            fitting = [other.id for other in entries if other is not None and other.kind in kinds]
            there = f"{', '.join(fitting)} is in memory" if fitting else "GET /admin/models lists what is here by kind"
            raise InvalidRequestError(
                f"{name} is {KINDS_IN_WORDS[entry.kind]}; this needs {needed}: {there}", param="model"
            )


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
