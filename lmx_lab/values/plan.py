"""What a model would use in memory, computed from the headers of its files before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lmx_lab.errors import counted, format_bytes
from lmx_lab.results.pages import Displayed
from lmx_lab.values.engine import ModelState
from lmx_lab.values.models import EngineName, Kind

STEP_TOKENS = 256
"""Number of tokens by which the caches of both engines grow."""
CONCURRENCY = (1, 4, 8)
"""Numbers of simultaneous requests for which a plan has the largest context."""

Fit = Literal["now", "after-unloading", "not-here"]
"""``now``: next to the models in memory. ``after-unloading``: when some of them are unloaded. ``not-here``: the memory
limit of this machine is too small."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The key-value cache of one layer, which grows with the tokens, up to a window if there is one, or not at all."""

    bytes_per_token: float = 0.0
    window_tokens: int | None = None
    chunk_tokens: int = 0
    """Number of tokens that are stored in addition to the window while a prompt is computed."""
    fixed_bytes: int = 0

    def bytes(self, tokens: int) -> float:
        """Return the size after this number of tokens, while a chunk of the prompt is computed."""
        allocated = -(-tokens // STEP_TOKENS) * STEP_TOKENS
        if self.window_tokens is not None:
            allocated = min(allocated, self.window_tokens + self.chunk_tokens)
        return self.fixed_bytes + self.bytes_per_token * allocated


def kv_bytes_per_token(layers: Iterable[LayerCache]) -> int:
    """Return the size of the caches that grow without a limit, for one token."""
    return round(sum(layer.bytes_per_token for layer in layers if layer.window_tokens is None))


def kv_constant_bytes(layers: Iterable[LayerCache]) -> int:
    """Return the size, for one request, of the caches that stop growing: full windows, and states of a fixed size."""
    windows = sum(layer.bytes_per_token * layer.window_tokens for layer in layers if layer.window_tokens is not None)
    return round(windows) + sum(layer.fixed_bytes for layer in layers)


@dataclass(frozen=True, kw_only=True)
class LargestContext:
    """The largest context with which a model can be loaded for a number of simultaneous requests."""

    requests: int
    context_length: int | None
    """Maximum number of tokens of each request, prompt and answer; None if there is no limit, 0 if memory is too small
    for this many requests."""

    def __str__(self) -> str:
        requests = counted(self.requests, "request")
        if self.context_length == 0:
            return f"too little memory for {requests}"
        return f"{'any number of' if self.context_length is None else f'{self.context_length:,}'} tokens for {requests}"


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadPlan(Displayed):
    """What a load would use in memory, and whether there is room for it: the result of ``plan``.

    The checks before a load compare the same numbers with the memory limit.
    """

    model: str
    engine: EngineName
    kind: Kind
    on_disk: bool = True
    """Whether the model is on the disk; if not, the headers were read from the hub."""
    file_bytes: int
    """Size of the weight files, including those of the draft model."""
    weights_bytes: int
    """Size of the weights in memory, including those of the draft model. On a CPU, MLX stores them as float32."""
    kv_bytes_per_token: int = 0
    """Size of the KV cache for each token of a request; 0 if it does not grow, and for encoders."""
    kv_constant_bytes: int = 0
    """Size, for each request, of the caches that stop growing: sliding windows, and states of recurrent layers."""
    needed_bytes: int
    """Memory with which the model can be loaded: weights, buffers, and the cache of the requested context or, without a
    request, of the shortest one."""
    context_length: int | None
    """Number of tokens that the model was trained for; None if its files do not contain it."""
    contexts: tuple[LargestContext, ...] = ()
    """The largest contexts if only pinned models stay in memory; empty for encoders."""
    tokens_per_second: float | None = None
    """Estimated upper bound of the decoding speed of one request: the measured memory bandwidth divided by
    ``read_bytes``; None for encoders, and if the bandwidth is not known."""
    read_bytes: int = 0
    """Size of the weights that are read for each token; those of experts in proportion to the number that is used."""
    limit_bytes: int = 0
    """How much models and caches may use together on this machine."""
    fits: Fit = "not-here"
    unload: tuple[str, ...] = ()
    """Ids of the models that have to be unloaded, if ``fits`` is ``after-unloading``; least recently used first."""
    memory_pressure: str | None = None
    """Why the machine is short of memory, if ``limit_bytes`` is therefore lower than usual; None otherwise."""

    @property
    def verdict(self) -> str:
        """Whether the model fits, in words."""
        if self.fits == "after-unloading":
            return f"fits after unloading {', '.join(self.unload)}"
        return "fits now" if self.fits == "now" else "does not fit here"

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the display: a name and a text each."""
        sizes = {"token of a request": self.kv_bytes_per_token, "request": self.kv_constant_bytes}
        caches = [f"{format_bytes(size)} for each {what}" for what, size in sizes.items() if size]
        speed = self.tokens_per_second
        rows = [
            ("verdict", self.verdict),
            ("memory", f"{format_bytes(self.needed_bytes)} needed, {format_bytes(self.limit_bytes)} allowed"),
            ("memory is short", self.memory_pressure or ""),
            ("weights", f"{format_bytes(self.weights_bytes)} in memory, {format_bytes(self.file_bytes)} of files"),
            ("KV cache", ", ".join(caches)),
            ("largest context", ", ".join(map(str, self.contexts))),
            ("decoding", f"at most about {speed:.{0 if speed >= 10 else 1}f} tokens/s" if speed is not None else ""),
            ("files", "" if self.on_disk else "not on the disk; headers read from the hub"),
        ]
        return [(name, text) for name, text in rows if text]

    def __str__(self) -> str:
        # Imported here, because few processes display plans.
        from lmx_lab.results.tables import align_columns

        return "\n".join([f"{self.model} on {self.engine}", *align_columns(self.rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from lmx_lab.results.tables import html_table

        return html_table((), self.rows(), caption=f"{self.model} on {self.engine}", row_names=True)


def find_room(
    needed_bytes: int, limit_bytes: int, models: Sequence[ModelState], *, surplus: int = 0
) -> tuple[Fit, tuple[str, ...]]:
    """Return whether a model fits, and the ids of the models that have to be unloaded for it.

    Models are unloaded until there is room: first those that are already being unloaded, then those without requests,
    the least recently used first, then the others. Pinned models stay.

    Args:
        limit_bytes: Memory of all models together.
        models: The models in the same memory, without the one that is to be loaded.
        surplus: Number of models that a load unloads even if there is room without them.
    """
    room_bytes = limit_bytes - sum(model.memory_bytes for model in models)
    if needed_bytes <= room_bytes:
        return "now", ()
    unload: list[str] = []
    others = [model for model in models if not model.pinned]
    others.sort(key=lambda model: (model.unloading is None, model.idle_since is None, model.idle_since or 0.0))
    for model in others:
        unload.append(model.entry.id)
        room_bytes += model.memory_bytes
        if needed_bytes <= room_bytes and len(unload) >= surplus:
            return "after-unloading", tuple(unload)
    return "not-here", ()
