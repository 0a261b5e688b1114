"""The models in memory. Find the one that a request names, and create the error if there is none. Pure.

Requests name models by id. A loaded model can also be named by an alias or its hub repository; by its path, for callers
on this machine; and by the last part of an id that is a path, for other callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lmx_lab.engine.scheduler import LOAD_FIRST
from lmx_lab.errors import (
    InvalidRequestError,
    LabError,
    ModelNotFoundError,
    NotLoadedError,
    OtherModelLoadedError,
    OutOfMemoryError,
    did_you_mean,
)
from lmx_lab.values.engine import EngineSnapshot, UnloadCause
from lmx_lab.values.models import KINDS_IN_WORDS, Kind, ModelEntry, Unloading

if TYPE_CHECKING:
    from lmx_lab.engine.model import LoadedModel

Model: TypeAlias = "LoadedModel[Any]"
Kinds = tuple[Kind, ...]
CHAT: Kinds = ("chat",)
EMBEDDING: Kinds = ("embedding",)
RERANK: Kinds = ("rerank", "embedding")
"""Kinds of models that rank documents, the preferred ones first."""
ANY_KIND: Kinds = ("chat", "embedding", "rerank")
REMEDIES: dict[Kind, str] = {
    "chat": LOAD_FIRST,
    "embedding": "load one (lab.load, lmx-lab load or POST /admin/models/load), or keep one in addition: "
    "lmx-lab serve --embedder ID, launch(embedder=ID)",
    "rerank": "load one (lab.load, lmx-lab load or POST /admin/models/load), or keep one in addition: "
    "lmx-lab serve --reranker ID or --embedder ID, launch(reranker=ID)",
}
STARTERS = {"chat": "smollm2-135m", "embedding": "minilm-l6"}
NONE_LOADED = "; no model is loaded"
"""End of the error message of a load that has failed if there was no previous model."""
MAX_LISTED = 5
"""Models on disk that an error message lists."""


# Models in memory


def is_beside(model: Model) -> bool:
    """Return whether a model is a pinned encoder, which stays in memory next to the main model."""
    return model.pinned and model.entry.kind != "chat"


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """The models in memory at one moment. A new object replaces it after each change, so any thread may read it."""

    loaded: tuple[Model, ...] = ()
    """In the order of their loads."""
    main: Model | None = None
    failure: LabError | None = None
    """Why the last main model left memory, if its engine lost it; see ``lost``."""
    unloaded: tuple[str, UnloadCause] | None = None
    """The model that was unloaded last, and why; None after a load."""

    @property
    def lost(self) -> LabError | None:
        """Why there is no main model, if its engine has lost it."""
        return self.failure if self.main is None else self.main.lost

    @property
    def models(self) -> list[Model]:
        """The models in the order in which they answer requests that name none: pinned encoders, the main model, then
        the others, the newest first. Models that their engines have lost are left out.
        """
        order = dict.fromkeys((*filter(is_beside, self.loaded), self.main, *reversed(self.loaded)))
        return [model for model in order if model is not None and model.lost is None]

    @property
    def entries(self) -> list[ModelEntry]:
        """The entries of ``models``."""
        return [model.entry for model in self.models]

    @property
    def idle_model(self) -> str | None:
        """Id of the main model that was unloaded because it was idle; None if there is another one."""
        is_idle = self.main is None and self.unloaded is not None and self.unloaded[1] == "idle"
        return self.unloaded[0] if is_idle and self.unloaded is not None else None

    def named(self, name: str | None, kinds: Kinds, *, local: bool) -> Model | None:
        """Return the model that answers a request; see ``ModelManager.model_for``."""
        models = self.models
        entries = [model.entry for model in models]
        entry = find_model(entries, loaded_id(name, entries, local=local), kinds)
        return models[entries.index(entry)] if entry is not None else None

    @property
    def present_main(self) -> Model | None:
        """The main model, unless its engine has lost it."""
        return self.main if self.main is not None and self.main.lost is None else None

    def find(self, name: str, *, local: bool) -> Model:
        """Return the model that has this name.

        Raises:
            InvalidRequestError: there is none.
        """
        if (found := self.named(name, ANY_KIND, local=local)) is not None:
            return found
        models = [model for model in self.models if not model.pinned] or self.models
        raise InvalidRequestError(not_loaded(name, [model.entry.id for model in models]), param="model")

    def with_newest(self, model: Model, *, as_main: bool, replaced: Model | None = None) -> InMemory:
        """Return the models after one was loaded, or was in memory and is loaded again.

        Args:
            as_main: Whether it becomes the main model even if there is one.
            replaced: The model whose place it takes.
        """
        others = (other for other in self.loaded if other is not model and other is not replaced)
        now = replace(self, loaded=(*others, model))
        is_first = self.main is None and not is_beside(model)
        if as_main or is_first or (self.main is not None and self.main is replaced):
            now = replace(now, main=model, failure=None, unloaded=None)
        return now

    def without(self, model: Model, *, stays: bool = False) -> InMemory:
        """Return the models after one was unloaded. If it was the main one, the newest of the others takes its place,
        but no pinned encoder.

        Args:
            stays: Whether it stays in memory, and only ceases to be the main model.
        """
        loaded = self.loaded if stays else tuple(other for other in self.loaded if other is not model)
        main = self.main
        if main is model:
            others = (it for it in reversed(loaded) if it is not model and it.lost is None and not is_beside(it))
            main = next(others, None)
        return replace(self, loaded=loaded, main=main)


# Names


def find_model(entries: Iterable[ModelEntry], name: str | None, kinds: Kinds) -> ModelEntry | None:
    """Return the model that answers a request: the first one of the most preferred kind that is in memory.

    Args:
        name: The id that the request names; None takes any model.
        kinds: Kinds of models that can answer, the preferred ones first.
    """
    found = list(entries)
    for kind in kinds:
        for entry in found:
            if kind in entry.kinds and name in (None, entry.id):
                return entry
    return None


def loaded_id(name: str | None, entries: Sequence[ModelEntry], *, local: bool) -> str | None:
    """Return the id of the model in memory that has this name; the name itself if none has.

    Args:
        local: Whether the caller is on this machine, and may name models by path.
    """
    if name is None or any(entry.id == name for entry in entries):
        return name
    for entry in entries:
        # A model ``org/name:Q4_K_M`` is also found as ``org/name``.
        is_repository = entry.source == "hub" and entry.id.partition(":")[0] == name
        is_path = Path(name) == entry.path if local else name == public_id(entry.id, local=False)
        if entry.has_alias(name) or is_repository or is_path:
            return entry.id
    return name


def public_id(model: str, *, local: bool) -> str:
    """Return the id of a model as a caller sees it. The id of a model that was loaded by its path is the path; callers
    on other machines see only the last part of it.
    """
    return model if local or not model.startswith(("/", "~", ".")) else Path(model).name


def public_unloading(state: Unloading) -> Unloading:
    """Return the state of an unload as callers on other machines see it."""
    return replace(state, replaced_by=state.replaced_by and public_id(state.replaced_by, local=False))


def is_idle_path(name: str, now: EngineSnapshot) -> bool:
    """Return whether the name is the path of the model that was unloaded because it was idle. A request may name this
    path, even from another machine.
    """
    return name == now.idle_model and Path(name).is_absolute()


# Refusals


def not_loaded(name: str, loaded: Sequence[str]) -> str:
    """Return the message for a model that is not in memory, with the ids of those that are."""
    ids = ", ".join(loaded[:-1]) + " and " * (len(loaded) > 1) + loaded[-1] if loaded else "no model"
    similar = did_you_mean(name, loaded) or ";"
    return f"{name[:200]} is not loaded{similar} {ids} {'are' if len(loaded) > 1 else 'is'} loaded"


def refusal(now: EngineSnapshot, name: str | None, kinds: Kinds) -> LabError:
    """Return the error of a request that no model in memory can answer.

    Args:
        name: The id that the request names.
        kinds: Kinds of models that could answer.
    """
    main, in_memory = now.entry, now.entries
    if (leaving := find_model(in_memory, name, kinds)) is not None:
        # The snapshot is older than the refusal: since then, an unload of this model has begun.
        return NotLoadedError(f"{leaving.id} is being unloaded; {LOAD_FIRST}")
    other = next((entry for entry in in_memory if entry.id == name and not entry.answers(kinds)), None)
    if other is not None:
        others = [entry.id for entry in in_memory if entry.answers(kinds)]
        return wrong_kind(other, kinds, f"{', '.join(others)} is in memory" if others else None)
    encoders = [entry for entry in in_memory if entry.kind != "chat"]
    if main is None and (kinds == CHAT or (not encoders and name is None and now.state == "loading")):
        return _none_loaded(now)
    if name is not None:
        removable = [state.entry for state in now.models if not state.pinned or state is now.main]
        loaded = encoders if encoders and kinds != CHAT else removable
        text = not_loaded(name, [entry.id for entry in loaded])
        return OtherModelLoadedError(f"{text}; {REMEDIES[kinds[0]]}", param="model")
    if kinds == CHAT:
        assert main is not None
        return NotLoadedError(f"{main.id} is {KINDS_IN_WORDS[main.kind]} and does not chat; {LOAD_FIRST}")
    what = f"{main.id} is {KINDS_IN_WORDS[main.kind]}, and no" if main is not None else "no"
    needed = " or ".join(KINDS_IN_WORDS[kind].partition(" ")[2] for kind in kinds)
    return NotLoadedError(f"{what} {needed} is in memory; {REMEDIES[kinds[0]]}")


def _none_loaded(now: EngineSnapshot) -> LabError:
    if now.state == "loading":
        return NotLoadedError("a model is being loaded; try again when GET /readyz returns 200", retry_after_s=1)
    if now.unload_cause == "memory":
        return OutOfMemoryError(
            f"{now.unloaded_model} was unloaded because memory ran out; load it again, or a smaller one"
        )
    if now.unload_cause == "idle":
        return NotLoadedError(f"{now.unloaded_model} was unloaded because it was idle; {LOAD_FIRST}")
    return NotLoadedError(f"no model is loaded; {LOAD_FIRST}")


def unknown_model(
    name: str, now: EngineSnapshot, kinds: Kinds, on_disk: Sequence[ModelEntry] = ()
) -> ModelNotFoundError:
    """Return the error of a name that no model on disk has. It is the same for any path, whether or not it exists."""
    possible = [entry for entry in (*now.entries, *on_disk) if entry.answers(kinds)]
    similar = did_you_mean(name, (public_id(entry.id, local=False) for entry in possible))
    advice = f"{similar} Requests" if similar else "; requests"
    # A pinned model may also be the main model, and is listed once.
    fitting = list({entry.id: None for kind in kinds for entry in now.entries if kind in entry.kinds})
    verb = "is" if len(fitting) < 2 else "are"
    loaded = f"{' and '.join(fitting) or 'no model that could answer'} {verb} loaded"
    return ModelNotFoundError(
        f"no model here has the id {name[:200]!r}{advice} name models by id, not by path: {loaded}, "
        "GET /admin/models lists all; a server started with --model-alias NAME=ID or --any-model accepts other names",
        param="model",
    )


def wrong_kind(entry: ModelEntry, kinds: Kinds, hint: str | None = None) -> InvalidRequestError:
    """Return the error of a request that names a model of a kind that cannot answer it."""
    needed = " or ".join(KINDS_IN_WORDS[kind] for kind in kinds)
    hint = hint or "GET /admin/models lists the models here with their kinds"
    return InvalidRequestError(
        f"{entry.id} is {KINDS_IN_WORDS[entry.kind]}; this needs {needed}: {hint}", param="model"
    )


def with_models_on_disk(
    error: NotLoadedError, name: str | None, on_disk: Sequence[ModelEntry], now: EngineSnapshot, kinds: Kinds
) -> LabError:
    """Return a refusal that also takes the models on disk into account.

    Args:
        error: The refusal that is based on the models in memory alone.
        name: The model that the request names.
    """
    if not isinstance(error, OtherModelLoadedError) and now.state == "loading":
        return error
    if name is None:
        if kinds == CHAT:
            return error
        fitting = list(dict.fromkeys(entry.id for kind in kinds for entry in on_disk if kind in entry.kinds))
        if fitting:
            remedy = f"on disk: {', '.join(fitting[:MAX_LISTED])}{', …' if len(fitting) > MAX_LISTED else ''}"
        else:
            starter = next(STARTERS[kind] for kind in kinds if kind in STARTERS)
            remedy = f"none of this kind is on disk: lmx-lab pull {starter} fetches one"
        return _extended(error, remedy)
    named = [entry for entry in on_disk if entry.id == name] or [entry for entry in on_disk if entry.has_alias(name)]
    if not named:
        in_memory = now.entries
        # The echo model has no files. If it is named, it is being unloaded.
        is_known = not in_memory or any(entry.id == name for entry in in_memory)
        return error if is_known else unknown_model(name, now, kinds, on_disk)
    if not named[0].answers(kinds):
        return wrong_kind(named[0], kinds)
    return _extended(error, "a server started with --swap loads the model that a request names")


def _extended(error: NotLoadedError, more: str) -> NotLoadedError:
    return type(error)(f"{error.message}; {more}", param=error.param, retry_after_s=error.retry_after_s)
