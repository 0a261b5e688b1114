"""One model in its process: how it is started, and what is known of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmx_lab.engine.container_limits import default_threads
from lmx_lab.engine.grammar.build import Marker
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.chat_format import ALL_MARKERS, detect_chat_format
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.memory_plan import Plan, plan
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.engine.llama_cpp.words import read_token_table
from lmx_lab.engine.templates.renderer import TemplateLimitError, TemplateRefusalError, default_sandbox
from lmx_lab.engine.text.chat_format_detection import ChatFormat
from lmx_lab.engine.validation import AMPLE_CHARACTERS
from lmx_lab.errors import EngineDeadError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_overwritten, require_unchanged, with_marks
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.gguf.model import read_gguf

SPINS = "3000"
"""See ``_environ``."""
PREFIX_SHARE = 10
"""Of the memory limit, what ended requests' caches may take where no setting says it, as on MLX."""
BESIDE_MODELS_BYTES = 2**30
"""What a process may take beyond all that models and the caches of ended requests may."""
CALL: Mapping[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
TOOL: Mapping[str, Any] = {"name": "look", "description": "?", "parameters": {"type": "object", "properties": {}}}
TRIALS: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "?"}], "bos_token": "", "eos_token": ""},
    {
        "messages": [
            {"role": "system", "content": "?"},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "?"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
)
"""The least that a chat is, and what llama.cpp asks of a template while it loads."""


@dataclass(kw_only=True, eq=False)
class Hosted:
    """A model that answers. Belongs to the engine's loop."""

    entry: ModelEntry
    header: GgufHeader
    plan: Plan
    process: LlamaProcess
    connection: LlamaConnection
    vocabulary_size: int
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    templated: bool = False
    """It has a chat template."""
    dimensions: int | None = None
    around_pair: int = 1
    """Tokens that llama.cpp puts around a query and a document, beside their own."""
    memory_bytes: int = 0
    progress_at: float = field(default_factory=time.perf_counter)
    """When a request last came, got something, or ended."""
    leaving: str | None = None
    """Why it takes no more requests."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of an encoder: one slice of texts at a time."""
    words: TokenTable | None = None
    """Of grammars; read when the first is asked for."""

    @property
    def context_length(self) -> int:
        return self.plan.context_length

    async def read_words(self) -> TokenTable:
        """Its vocabulary, for grammars."""
        if self.words is None:
            read = functools.partial(read_header, self.entry.path, arrays=True)
            self.words = await asyncio.to_thread(lambda: read_token_table(read()))
        return self.words

    async def tokenized(self, text: str, *, most: int, parse_special: bool) -> list[int]:
        """Token ids, special ones at the ends included; of a text with more than ``most``, those of a beginning that
        has more, too: megabytes would take seconds.
        """
        characters = most * AMPLE_CHARACTERS
        while True:
            question = {"content": text[:characters], "add_special": True, "parse_special": parse_special}
            tokens = [int(token) for token in (await self.connection.ask("/tokenize", question))["tokens"]]
            if len(tokens) > most or characters >= len(text):
                return tokens
            characters *= 2

    def look(self) -> None:
        """Measure its memory. End it if somebody has written to its file: it would compute with what that is now."""
        self.memory_bytes = self.process.memory_bytes or self.memory_bytes
        if is_overwritten(self.entry):
            self.process.condemn()

    def death(self) -> EngineDeadError:
        """What to say after its process has died."""
        return EngineDeadError(
            f"the process of llama.cpp with {self.entry.id} has died: {self.process.reason()}; load a model again"
        )


async def host(entry: ModelEntry, settings: Settings, *, limit_bytes: int) -> Hosted:
    """Start a process with this model.

    Raises:
        UnusableModelError, OutOfMemoryError: with llama.cpp's reason.
    """
    entry = await in_thread(functools.partial(with_marks, entry))
    header = await in_thread(functools.partial(read_gguf, entry.path))
    if (template := header.text("tokenizer.chat_template")) is not None and entry.kind == "chat":
        await asyncio.to_thread(_try_out, template, entry)
    planned = plan(entry, header, slots=settings.slots, limit_bytes=limit_bytes)
    fields = _fields(entry, header, planned, settings, limit_bytes)
    most = limit_bytes + _kept_bytes(settings, limit_bytes) + BESIDE_MODELS_BYTES
    process = await LlamaProcess.start(entry.path, fields, environ=_environ(os.environ), most_bytes=most)
    try:
        connection = LlamaConnection(process.socket, process.api_key)
        hosted = await _described(entry, header, planned, process, connection)
        require_unchanged(entry)
    except BaseException as exc:
        await process.stop()
        if isinstance(exc, RefusedError | LabError) and not isinstance(exc, UnusableModelError):
            raise UnusableModelError(f"{entry.path} is loaded by llama.cpp, but does not answer: {exc}") from exc
        raise
    return hosted


def _try_out(template: str, entry: ModelEntry) -> None:
    """In a process that can be ended: llama.cpp renders it while it loads, where nobody could tell why that takes long.

    Raises:
        UnusableModelError: it goes over its limits. What else is wrong with it llama.cpp says, or does not mind.
    """
    for given in TRIALS:
        with contextlib.suppress(TemplateRefusalError):
            try:
                default_sandbox().render(template, {"add_generation_prompt": True, **given})
            except TemplateLimitError as exc:
                raise UnusableModelError(
                    f"{entry.path} cannot be loaded: its chat template {exc}, its limit", param="model"
                ) from exc


def _fields(
    entry: ModelEntry, header: GgufHeader, planned: Plan, settings: Settings, limit_bytes: int
) -> Mapping[str, Any]:
    """Of llama.cpp's ``CommonParams``."""
    threads = settings.threads or default_threads(os.environ)
    shared: dict[str, Any] = {
        "cpuparams.n_threads": threads,
        "cpuparams_batch.n_threads": threads,
        # It would choose another context than planned, and read a broken file twice.
        "fit_params": False,
        "endpoint_metrics": True,
        "ui": False,
        "verbosity": 1,
        "n_ctx": planned.cache_tokens,
        "n_batch": planned.batch_tokens,
        "n_ubatch": planned.batch_tokens,
        "kv_unified": planned.unified,
    }
    if entry.kind != "chat":
        # Most models were trained with the mean of their tokens, where a file does not say.
        pooled = header.integer(f"{entry.architecture}.pooling_type")
        return shared | {
            "embedding": True,
            "pooling_type": "RANK" if entry.kind == "rerank" else None if pooled else "MEAN",
            "n_parallel": planned.slots,
        }
    return shared | {
        # One more than requests take: forms are tried on it.
        "n_parallel": planned.slots + 1,
        "cache_ram_mib": _kept_bytes(settings, limit_bytes) // 2**20,
        "use_jinja": True,
        # The chat format has no place for "go on with the assistant's last message".
        "prefill_assistant": False,
        "n_threads_http": planned.slots + settings.queue_limit + 4,
    }


def _kept_bytes(settings: Settings, limit_bytes: int) -> int:
    """Of the caches of ended requests."""
    return limit_bytes // PREFIX_SHARE if settings.prefix_cache_bytes is None else settings.prefix_cache_bytes


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """How long llama.cpp's threads wait for each other before they sleep, unless somebody has chosen.

    By default they spin for so long that beside one other busy program two threads on two cores fell from 130 to as
    little as 1 token/s; this way to 20, and nothing is lost on a quiet machine (measured).
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ) else {"GOMP_SPINCOUNT": SPINS}


async def _described(
    entry: ModelEntry, header: GgufHeader, planned: Plan, process: LlamaProcess, connection: LlamaConnection
) -> Hosted:
    (model,) = (await connection.get("/v1/models"))["data"]
    hosted = Hosted(
        entry=entry,
        header=header,
        plan=planned,
        process=process,
        connection=connection,
        vocabulary_size=int(model["meta"]["n_vocab"]),
        memory_bytes=process.memory_bytes,
    )
    if entry.kind == "chat":
        # llama.cpp has a template of its own where the file has none; ours is an error.
        hosted.templated = header.text("tokenizer.chat_template") is not None
        props = await connection.get("/props")
        markers = {name: marker for name in ALL_MARKERS if (marker := await _marker(connection, name)) is not None}
        hosted.chat_format = detect_chat_format(props["chat_template"], props["chat_template_caps"], markers)
    else:
        hosted.dimensions = int(model["meta"]["n_embd"])
        if entry.kind == "rerank" and (form := header.text("tokenizer.chat_template.rerank")) is not None:
            empty = form.replace("{query}", "").replace("{document}", "")
            hosted.around_pair += len(await hosted.tokenized(empty, most=len(form), parse_special=True))
    return hosted


async def _marker(connection: LlamaConnection, text: str) -> Marker | None:
    """The marker as the one token that it is, if it is."""
    found = await connection.ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})
    tokens = found["tokens"]
    return (int(tokens[0]),) if len(tokens) == 1 else None
