"""Start the process of a model, and read the properties of the model."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lmx_lab.engine.grammar.build import Marker
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.answer import TokenIndex
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker, read_token_table
from lmx_lab.engine.llama_cpp.memory_plan import ContextPlan, cache_dtype, is_batch_invariant, plan_context
from lmx_lab.engine.llama_cpp.process import PACKAGE, LlamaProcess
from lmx_lab.engine.memory import default_threads, prefix_cache_bytes
from lmx_lab.engine.text.chat_format_detection import HARMONY, HARMONY_TOKENS, MORE_REASONING_MARKERS, ChatFormat
from lmx_lab.engine.text.tool_prompt import END, START
from lmx_lab.engine.tokenizing.encoder import LIMIT_S, SHORT_CHARACTERS
from lmx_lab.engine.validation import CHARACTERS_PER_TOKEN, check_vocabularies
from lmx_lab.errors import EngineDeadError, LabError, QueueFullError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import KvCacheDtype, LoadSpec, ModelEntry
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_overwritten, require_unchanged
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.tokenizer_files import InfillTokens, gguf_infill_tokens

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.slot_files import SlotFiles

GROWTH = 4
"""Factor by which more of a text is tokenized if its beginning does not show that it is too long."""
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**24)}
"""Settings of glibc with which the process returns the memory of long texts."""
PLAN_FACTOR = 1.5
"""Ratio of a process's memory limit to the planned memory of its model and context."""
SLOT_TEXTS = {"LLAMA_SERVER_SLOTS_DEBUG": "1"}
"""Environment variables with which ``/slots`` contains the text of the last answer in each slot."""
EXTRA_BYTES = 2**30
"""Memory that a process may use beyond the limits of models and of the caches of ended requests."""
ALL_MARKERS = (*(marker for pair in MORE_REASONING_MARKERS for marker in pair), START, END)

PROMPT_LOOKUP: Mapping[str, Any] = {
    "speculative_type": "NGRAM_MAP_K",
    "speculative.ngram_map_k.size_n": 4,
    "speculative.ngram_map_k.size_m": 8,
}
"""Draft up to 8 tokens that followed the same 4 tokens earlier. Of llama.cpp's methods, this one is about the fastest
for copied text, and costs little for other text (measured)."""


TOKENS = "tokenizer.ggml.tokens"
CACHE_TYPES: Mapping[KvCacheDtype, int] = {"q8_0": 8, "q4_0": 2}
"""Numbers of the types in llama.cpp (``ggml_type``)."""
INVARIANT_ATTENTION: Mapping[str, int] = {"cache_type_v": 30}
"""Stores values in bfloat16, and keys in float16. If the two types differ, llama.cpp computes the attention of each
token in the same way. If both are the same float type, it adds the terms in another order when a step has 64 or more
tokens of a request, or when a request with one token in the step has 512 or more tokens in its cache. The result then
depends on the cached part of the prompt and on other requests. With different types, prompts of 512 and 1,400 tokens
take 1.25 and 1.6 times the CPU time (measured with SmolLM2-135M), and decoding takes the same time."""


@dataclass(kw_only=True, eq=False)
class HostedModel:
    """A model in its process, which is ready for requests. Belongs to the engine's loop."""

    entry: ModelEntry
    header: GgufHeader
    plan: ContextPlan
    process: LlamaProcess
    connection: LlamaConnection
    vocabulary_size: int
    batch_invariant: bool = False
    """Whether the bits of an answer do not depend on other requests and on cached prompts."""
    uses_drafts: bool = False
    """Whether llama.cpp drafts tokens, with a draft model or by prompt lookup."""
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    dimensions: int | None = None
    pair_overhead_tokens: int = 1
    """Number of tokens that llama.cpp adds to those of a query and a document."""
    memory_bytes: int = 0
    progress_at: float = field(default_factory=time.perf_counter)
    """When a request last arrived, received something, or ended (``time.perf_counter``)."""
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while one slice of texts is computed."""
    long_texts: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a long text is tokenized, so that this keeps one core busy at most."""
    slot_files: SlotFiles | None = None
    """Keeps slots on disk; None if that is off."""
    grammars: GrammarChecker | None = None
    """Checks grammars; created with the first one."""
    token_table: TokenTable | None = None
    """Vocabulary for grammars; read when it is first needed."""
    token_index: TokenIndex | None = None
    """Vocabulary by bytes; created when it is first needed."""
    _infill: tuple[InfillTokens | None] | None = None
    """The tokens with which the model fills a gap; None until the first request needs them."""

    @property
    def context_length(self) -> int:
        return self.plan.context_length

    async def load_token_table(self) -> TokenTable:
        """Return the vocabulary for grammars."""
        if self.token_table is None:
            read = functools.partial(read_header, self.entry.path, arrays=True)
            self.token_table = await asyncio.to_thread(lambda: read_token_table(read()))
        return self.token_table

    async def load_infill_tokens(self) -> InfillTokens | None:
        """Return the tokens with which the model fills a gap; None if it has none."""
        if self._infill is None:
            self._infill = (await in_thread(functools.partial(gguf_infill_tokens, self.entry)),)
        return self._infill[0]

    async def load_token_index(self) -> TokenIndex:
        """Return the vocabulary by its bytes."""
        if self.token_index is None:
            self.token_index = TokenIndex((await self.load_token_table()).tokens)
        return self.token_index

    async def tokenize(self, text: str, *, at_most: int, parse_special: bool, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: Whether to add special tokens at its ends, if the model has any.
            at_most: Number of tokens that the caller needs. A longer text is tokenized only far enough to show that
                it has more tokens, because megabytes would take seconds.
            parse_special: Whether the text of a special token becomes that token.

        Raises:
            QueueFullError: other long texts were tokenized for ``LIMIT_S``.
        """
        characters = at_most * CHARACTERS_PER_TOKEN
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = {"content": text[:characters], "add_special": add_special, "parse_special": parse_special}
            if min(len(text), characters) <= SHORT_CHARACTERS:
                answer = await self.connection.post("/tokenize", body)
            else:
                try:
                    await asyncio.wait_for(self.long_texts.acquire(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    raise QueueFullError(
                        f"the text was not tokenized within {LIMIT_S:g} s, because other texts were; try again in 2 s, "
                        "or send less",
                        retry_after_s=2,
                    ) from None
                # A task, because llama.cpp tokenizes the text to its end even if the caller is cancelled.
                task = asyncio.create_task(self.connection.post("/tokenize", body))
                task.add_done_callback(self._end_long_text)
                answer = await asyncio.shield(task)
            tokens = [int(token) for token in answer["tokens"]]
            if len(tokens) > at_most or characters >= len(text):
                return tokens
            characters *= GROWTH

    def _end_long_text(self, task: asyncio.Task[Any]) -> None:
        self.long_texts.release()
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    def measure(self) -> None:
        """Measure the memory of the process. End the process if its file was overwritten: it would use the new data."""
        self.memory_bytes = self.process.memory_bytes or self.memory_bytes
        if is_overwritten(self.entry):
            self.process.kill_for_overwritten_file()

    def death_error(self) -> EngineDeadError:
        """Return the error for requests after the process has died."""
        return EngineDeadError(
            f"the process of llama.cpp with {self.entry.id} has died: {self.process.reason()}; load a model again"
        )


async def host_model(entry: ModelEntry, spec: LoadSpec, settings: Settings, *, limit_bytes: int) -> HostedModel:
    """Start a process with this model, and return the model when it is ready.

    Raises:
        UnusableModelError, OutOfMemoryError: llama.cpp cannot load the model; the message has the reason.
    """
    header = await in_thread(functools.partial(read_gguf, entry.path))
    draft = await in_thread(functools.partial(read_draft, entry))
    plan = plan_context(entry, header, slots=settings.slots, limit_bytes=limit_bytes, spec=spec, draft=draft)
    fields = _common_params(entry, header, plan, settings, limit_bytes, spec=spec)
    if draft is not None:
        prefix = "speculative.draft."
        threads = {name: fields[name] for name in ("cpuparams.n_threads", "cpuparams_batch.n_threads")}
        fields |= {"speculative_type": "DRAFT_SIMPLE", f"{prefix}mparams.path": str(draft.path)}
        fields |= {f"{prefix}{name}": count for name, count in threads.items()}
        fields |= _cache_types(cache_dtype(draft, spec), prefix)
    allowed = min(limit_bytes, round(plan.bytes * PLAN_FACTOR))
    max_bytes = max(0, allowed + prefix_cache_bytes(settings.prefix_cache_bytes, limit_bytes) + EXTRA_BYTES)
    environ = {**llama_environ(os.environ), **SLOT_TEXTS}
    process = await LlamaProcess.start(entry.path, fields, environ=environ, max_bytes=max_bytes)
    try:
        connection = LlamaConnection(process.socket, process.api_key)
        hosted = await _describe(entry, header, plan, process, connection)
        hosted.uses_drafts = "speculative_type" in fields
        quantizes_cache = cache_dtype(header, spec) is not None
        hosted.batch_invariant = spec.deterministic or (is_batch_invariant(header) and quantizes_cache)
        require_unchanged(entry)
        hosted.slot_files = _open_slot_files(hosted, fields, settings)
    except BaseException as exc:
        await process.stop()
        if isinstance(exc, RefusedError | LabError) and not isinstance(exc, UnusableModelError):
            raise UnusableModelError(f"{entry.path} is loaded by llama.cpp, but does not answer: {exc}") from exc
        raise
    return hosted


def _open_slot_files(hosted: HostedModel, fields: Mapping[str, Any], settings: Settings) -> SlotFiles | None:
    if hosted.entry.kind != "chat" or settings.prefix_cache_dir is None:
        return None
    # Imported here, because numpy is slow to import, and few servers keep slots on disk.
    from lmx_lab.engine.llama_cpp.slot_files import ARITHMETIC, SlotFiles, can_be_trimmed
    from lmx_lab.engine.prefix_files import PrefixFiles

    if (files := PrefixFiles.of(settings)) is None:
        return None
    versions = [f"{package} {version(package)}" for package in ("lmx-lab", PACKAGE)]
    arithmetic = [*versions, *(f"{name} {fields.get(name)}" for name in ARITHMETIC)]
    opening = asyncio.create_task(in_thread(functools.partial(files.open, hosted.entry, arithmetic)))
    trims = can_be_trimmed(hosted.header)
    return SlotFiles(files, hosted.connection, hosted.process.folder, opening, trims=trims)


def _common_params(
    entry: ModelEntry,
    header: GgufHeader,
    plan: ContextPlan,
    settings: Settings,
    limit_bytes: int,
    *,
    spec: LoadSpec,
) -> dict[str, Any]:
    """Return the fields of llama.cpp's ``CommonParams``."""
    threads = settings.threads or default_threads(os.environ)
    shared: dict[str, Any] = {
        "cpuparams.n_threads": threads,
        "cpuparams_batch.n_threads": threads,
        # Otherwise, llama.cpp would choose another context length, and read a broken file twice.
        "fit_params": False,
        "endpoint_metrics": True,
        "ui": False,
        "verbosity": 1,
        "n_ctx": plan.cache_tokens,
        "n_batch": plan.batch_tokens,
        "n_ubatch": 1 if plan.one_by_one else plan.batch_tokens,
        "kv_unified": plan.unified,
    }
    if entry.kind != "chat":
        # If the file does not specify the pooling, the mean is used, with which most models were trained.
        pooled = header.integer(f"{entry.architecture}.pooling_type")
        return shared | {
            "embedding": True,
            "pooling_type": "RANK" if entry.kind == "rerank" else None if pooled else "MEAN",
            "n_parallel": plan.slots,
        }
    return shared | {
        # One slot more than requests use, for trials of grammars.
        "n_parallel": plan.slots + 1,
        "cache_ram_mib": prefix_cache_bytes(settings.prefix_cache_bytes, limit_bytes) // 2**20,
        "use_jinja": True,
        "endpoint_slots": True,
        # In the chat format, a last message of the assistant is complete and is not continued.
        "prefill_assistant": False,
        "n_threads_http": plan.slots + settings.queue_limit + 4,
        **(PROMPT_LOOKUP if spec.prompt_lookup else {}),
        **(INVARIANT_ATTENTION if spec.deterministic and not plan.one_by_one else {}),
        **_cache_types(spec.kv_cache_dtype),
    }


def read_draft(entry: ModelEntry) -> GgufHeader | None:
    """Return the header of the draft model; None if there is none.

    Raises:
        UnusableModelError: its file cannot be used, or has another vocabulary.
    """
    if (draft := entry.draft) is None:
        return None
    header = read_gguf(draft.path)
    target_tokens, tokens = (read_header(it.path, arrays=True).items(TOKENS) for it in (entry, draft))
    check_vocabularies(entry, draft, target_tokens, tokens)
    return header


def _cache_types(dtype: KvCacheDtype | None, prefix: str = "") -> dict[str, int]:
    # Needs flash attention, which llama.cpp uses for all models that support it, and refuses the others.
    return {f"{prefix}cache_type_{side}": CACHE_TYPES[dtype] for side in "kv"} if dtype is not None else {}


def llama_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``MALLOC``, and how long llama.cpp's threads spin before they sleep, unless the user has set them.

    By default they spin so long that, next to one other busy program, two threads on two cores slowed down from 130 to
    as little as 1 token/s. With this value they reach 20 tokens/s, and the speed on an idle machine is the same
    (measured).
    """
    malloc = {name: value for name, value in MALLOC.items() if name not in environ}
    return malloc if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ) else malloc | {"GOMP_SPINCOUNT": "3000"}


async def _describe(
    entry: ModelEntry, header: GgufHeader, plan: ContextPlan, process: LlamaProcess, connection: LlamaConnection
) -> HostedModel:
    (model,) = (await connection.get("/v1/models"))["data"]
    hosted = HostedModel(
        entry=entry,
        header=header,
        plan=plan,
        process=process,
        connection=connection,
        vocabulary_size=int(model["meta"]["n_vocab"]),
        memory_bytes=process.memory_bytes,
    )
    if entry.kind == "chat":
        props = await connection.get("/props")
        markers: dict[str, Marker] = {}
        for name in ALL_MARKERS:
            body = {"content": name, "add_special": False, "parse_special": True}
            tokens = (await connection.post("/tokenize", body))["tokens"]
            if len(tokens) == 1:
                markers[name] = (int(tokens[0]),)
        hosted.chat_format = detect_chat_format(props["chat_template"], props["chat_template_caps"], markers)
    else:
        hosted.dimensions = int(model["meta"]["n_embd"])
        if entry.kind == "rerank" and (pair_template := header.text("tokenizer.chat_template.rerank")) is not None:
            empty = pair_template.replace("{query}", "").replace("{document}", "")
            hosted.pair_overhead_tokens += len(
                await hosted.tokenize(empty, at_most=len(pair_template), parse_special=True)
            )
    return hosted


def detect_chat_format(template: str, caps: Mapping[str, Any], markers: Mapping[str, Marker]) -> ChatFormat:
    """Detect how a GGUF model writes reasoning and tool calls.

    Args:
        caps: ``chat_template_caps`` of llama.cpp's ``/props``.
        markers: The strings of ``ALL_MARKERS`` that are one token of this model.
    """
    # The prompt may open the reasoning, so the closing marker need not be in the template.
    markers_of_template = next((pair for pair in MORE_REASONING_MARKERS if pair[0] in template), None)
    harmony = all(token in template for token in HARMONY_TOKENS[1:])
    return ChatFormat(
        reasoning_markers=None if harmony else markers_of_template,
        supports_tools=bool(caps.get("supports_tools")),
        supports_system=bool(caps.get("supports_system_role", True)),
        transitions=HARMONY if harmony else {},
        markers={name: markers.get(name, (name,)) for name in (*(markers_of_template or ()), START, END)},
    )
