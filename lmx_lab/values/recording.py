"""Define what is recorded of a request: its tokens, its settings, its timings, and what computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.values.timeline import EngineStep

RecordMode = Literal["own", "all", "off"]
"""Which requests are recorded: those of the lab's own notebook, those of all clients, or none."""
NO_HASH = ""
"""The hash of files that have not been read yet, or of a model without files."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The model, software and machine that computed an answer.

    A provenance contains no host names, user names, folders, keys or addresses.
    """

    model: str
    weights: str = NO_HASH
    """SHA-256 of all files that the load has read: weights, configuration, tokenizer, template. It is computed in the
    background at the first record of a model, and is empty until then."""
    template: str = NO_HASH
    """SHA-256 of the model's chat templates; computed together with ``weights``."""
    format: str
    quantization: str | None
    """Quantization of the files."""
    dtype: str
    """The setting ``dtype`` of the load, which selects the data type of the weights in memory."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the load that differ from their defaults, such as ``deterministic``."""
    engine: str
    """Name and version of the library that computed the answer, such as ``mlx-0.32.4``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A request to generate an answer again from a given position, after exactly the same tokens."""

    request: Mapping[str, Any]
    """The request of the answer, as in its ``Record``."""
    model: str
    weights: str = NO_HASH
    """SHA-256 of the files of the model that has to be loaded; empty if it is not known."""
    format: str = ""
    """Format of these files; empty if it is not known."""
    prompt: tuple[int, ...]
    """Token ids of the rendered prompt."""
    answer: tuple[int, ...]
    """Token ids of the answer up to the position."""
    token: int | str | None
    """The token at the position: an id, or a text of exactly one token; None generates it."""
    seed: int | None = None
    """Seed of the generation; None draws one."""
    max_tokens: int | None = None
    """Maximum number of tokens of the whole answer; None takes that of the request."""
    top_logprobs: int | None = None
    """Number of alternatives to report for each generated token; None takes that of the request."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One recorded answer to a request."""

    id: int = 0
    """Number of the record in its recording; assigned when it is stored."""
    at: float
    """Unix time of the request."""
    request_id: str
    """Id of the request in the log and in ``/admin/events``; empty for requests of the notebook."""
    own: bool
    """Whether the request was one of the lab's own notebook."""
    batch: bool = False
    """Whether the request was one of many, such as a row of ``lab.map``. Fewer of these are kept in memory."""
    choice: int = 0
    """Index of the answer among those to the same prompt."""
    request: Mapping[str, Any]
    """The request to the engine as JSON values: the prompt, the sampling parameters as applied, the seed as drawn."""
    prompt: tuple[int, ...]
    """Token ids of the rendered prompt."""
    answer: tuple[int, ...] | None
    """Token ids of the answer; None if the engine did not report all of them."""
    text: str
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The name and the arguments of each call, which are a JSON text."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the answer's tokens, if the request asked for them."""
    outcome: str
    """``stop``, ``length``, ``tool_calls``, ``cancelled`` or ``error``."""
    code: str | None = None
    """Code of the error; None if there was none."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Counts of tokens, and seconds, as in ``GenerationReport``; empty if the answer did not end normally."""
    steps: tuple[EngineStep, ...] = ()
    """The engine's steps for the request."""
    provenance: Provenance
