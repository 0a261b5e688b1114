"""What a request may call the model it means, and what it is told if that model is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmx_lab.errors import InvalidRequestError, LabError, ModelNotFoundError, NotLoadedError, OtherModelLoadedError
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import KINDS_IN_WORDS, Kind, ModelEntry

Kinds = tuple[Kind, ...]
CHAT: Kinds = ("chat",)
EMBEDDING: Kinds = ("embedding",)
RERANK: Kinds = ("rerank", "embedding")
"""Embedding models rank too, if no reranker is there."""
ANY: Kinds = ("chat", "embedding", "rerank")
STARTER = {"chat": "smollm2-135m", "embedding": "minilm-l6"}
LISTED = 5
# An absolute path of two parts at least that is no route of this server and no part of an address.
_PATH = re.compile(r"(?<![\w:/.])/(?!(?:v\d|admin)/)(?:[^\s/'\":;,()]+/)+(?P<last>[^\s/'\":;,()]*)")


def in_memory(now: EngineSnapshot) -> list[ModelEntry]:
    """The models that are loaded: the pinned ones, then the one that load and unload speak of."""
    return [*(pinned.entry for pinned in now.pinned), *([now.entry] if now.entry is not None else [])]


def rests_by_path(name: str, now: EngineSnapshot) -> bool:
    """Whether this is the path under which a model rests: who asks for it names no path of their own choice."""
    return name == now.resting_model and Path(name).is_absolute()


def loaded_id(name: str | None, now: EngineSnapshot, *, local: bool) -> str | None:
    """The id of what is loaded, if the name is its repository (``org/name`` of ``org/name:Q4_K_M``), or its path and
    the caller local, or what other callers see in place of its path; else the name."""
    held = in_memory(now)
    if name is None or any(entry.id == name for entry in held):
        return name
    meant = (entry.id for entry in held if _is_repository(name, entry) or _is_at(name, entry, local=local))
    return next(meant, name)


def _is_at(name: str, entry: ModelEntry, *, local: bool) -> bool:
    return Path(name) == entry.path if local else name == shown_id(entry.id, local=False)


def _is_repository(name: str, entry: ModelEntry) -> bool:
    return entry.source == "hub" and entry.id.partition(":")[0] == name


def shown_id(model: str, *, local: bool) -> str:
    """The id of a model as a caller sees it. That of a model loaded by its path is the path; callers that are not local
    see the last part of it.
    """
    return model if local or not model.startswith(("/", "~", ".")) else Path(model).name


def without_paths(text: str, folders: Iterable[Path] = ()) -> str:
    """The text with paths of the file system cut down to their last part.

    Args:
        folders: Whose paths may have blanks in them; what lies in them keeps its path within the folder.
    """
    for folder in sorted(map(str, folders), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return _PATH.sub(lambda match: match["last"] or "(a folder)", text)


def unknown_model(name: str, now: EngineSnapshot, kinds: Kinds) -> ModelNotFoundError:
    """True of paths too, whatever lies there."""
    # Once each: a pinned model may be the loaded one too.
    fitting = list({entry.id: None for kind in kinds for entry in in_memory(now) if kind in entry.kinds})
    verb = "is" if len(fitting) < 2 else "are"
    loaded = f"{' and '.join(fitting) or 'none that would do'} {verb} loaded"
    return ModelNotFoundError(
        f"no model here has the id {name[:200]!r}; requests name models by id, not by path: {loaded}, "
        "GET /admin/models lists all",
        param="model",
    )


def wrong_kind(entry: ModelEntry, kinds: Kinds) -> InvalidRequestError:
    needed = " or ".join(KINDS_IN_WORDS[kind] for kind in kinds)
    said = (
        f"{entry.id} is {KINDS_IN_WORDS[entry.kind]}; this needs {needed}: GET /admin/models lists what is here by kind"
    )
    return InvalidRequestError(said, param="model")


def not_loaded(
    exc: NotLoadedError, name: str | None, entries: Sequence[ModelEntry], now: EngineSnapshot, *, kinds: Kinds = CHAT
) -> LabError:
    """What to say in the place of the engine, which knows neither the disk nor what a route needs.

    Args:
        name: Of the model, in the request.
        entries: What is on this disk.
    """
    if not isinstance(exc, OtherModelLoadedError) and now.state == "loading":
        return exc
    if name is None:
        return _said(exc, _remedy(entries, kinds)) if kinds != CHAT else exc
    found = next((entry for entry in entries if entry.id == name), None)
    if found is None:
        return unknown_model(name, now, kinds) if in_memory(now) else exc
    if not found.answers(kinds):
        return wrong_kind(found, kinds)
    return _said(exc, "a server started with --swap loads what is named")


def _remedy(entries: Sequence[ModelEntry], kinds: Kinds) -> str:
    """Which models would do."""
    fitting = [entry.id for kind in kinds for entry in entries if kind in entry.kinds]
    if fitting:
        return f"on this disk: {', '.join(fitting[:LISTED])}{', …' if len(fitting) > LISTED else ''}"
    starter = next(STARTER[kind] for kind in kinds if kind in STARTER)
    return f"none of the kind is on this disk: lmx-lab pull {starter} fetches one"


def _said(exc: NotLoadedError, more: str) -> NotLoadedError:
    return type(exc)(f"{exc.message}; {more}", param=exc.param, retry_after_s=exc.retry_after_s)


def check_unloads(name: str, now: EngineSnapshot, *, local: bool) -> None:
    """Whether unloading what is loaded unloads the model of that name.

    Raises:
        InvalidRequestError: it stays, or is not in memory at all.
    """
    meant = loaded_id(name, now, local=local)
    if meant == now.model:
        return
    if any(pinned.entry.id == meant for pinned in now.pinned):
        raise InvalidRequestError(f"{meant} is pinned: it stays until the server ends", param="model")
    raise InvalidRequestError(f"{name[:200]} is not loaded, {now.model or 'no model'} is", param="model")
