"""Provide the llama.cpp engine, whose models are computed in other processes.

Queue, slots, deadlines and ends of requests are implemented here, because llama.cpp's own server lacks them: it cannot
cancel a waiting request, and a full cache ends all requests (both measured).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.llama_cpp.completion import EXACT_TOKENS, TRIAL_SLOT, AnswerReader, is_repeatable
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.memory_plan import ContextPlan, cache_dtype, is_batch_invariant, plan_context, plan_load
from lmx_lab.engine.llama_cpp.process import (
    PACKAGE,
    LlamaProcess,
    death_error,
    explained_end,
    llama_environ,
    require_installed,
)
from lmx_lab.engine.llama_cpp.scoring import LlamaScorer
from lmx_lab.engine.llama_cpp.slots import LlamaSlots
from lmx_lab.engine.llama_cpp.tokenizer import GgufTokenizer, LlamaTokenizer
from lmx_lab.engine.memory import default_threads, prefix_cache_bytes, total_bytes
from lmx_lab.engine.model import EngineHost, EngineMemory, LoadedModel
from lmx_lab.engine.requests import EmbeddingRequest, Embeddings
from lmx_lab.engine.scheduler import Permit
from lmx_lab.engine.text.chat_format_detection import ChatFormat, detect_chat_format
from lmx_lab.engine.texts import TextJob, TextTokens
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, try_template
from lmx_lab.engine.validation import (
    check_characters,
    check_options,
    check_text,
    check_token_ids,
    check_vocabularies,
    context_error,
)
from lmx_lab.errors import EngineError, InvalidRequestError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import TokenTotals
from lmx_lab.values.models import KvCacheDtype, LoadSpec, ModelEntry
from lmx_lab.values.outputs import InputType, Vectors
from lmx_lab.values.plan import LoadPlan
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import is_overwritten, require_unchanged
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.tokenizer_files import chat_templates

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.slot_files import SlotFiles

log = logging.getLogger(__name__)
MEASURE_S = 1.0
"""Interval at which the memory and the files of a model are checked."""
SLICE = 16
"""Number of texts sent together. Between two slices, other requests are computed and cancellations take effect."""
PLAN_FACTOR = 1.5
"""Ratio of a process's memory limit to the planned memory of its model and context."""
EXTRA_BYTES = 2**30
"""Memory that a process may use beyond the limits of models and of the caches of ended requests."""
PROMPT_LOOKUP: Mapping[str, Any] = {
    "speculative_type": "NGRAM_MAP_K",
    "speculative.ngram_map_k.size_n": 4,
    "speculative.ngram_map_k.size_m": 8,
}
"""Draft up to 8 tokens that followed the same 4 tokens earlier. Of llama.cpp's methods, this one is about the fastest
for copied text, and costs little for other text (measured)."""
BATCH_DEPENDENT = "-batch-dependent"
TOKENS = "tokenizer.ggml.tokens"
CACHE_TYPES: Mapping[KvCacheDtype, int] = {"q8_0": 8, "q4_0": 2}
"""Numbers of the types in llama.cpp (``ggml_type``)."""
INVARIANT_ATTENTION: Mapping[str, int] = {"cache_type_v": 30}
"""Stores values in bfloat16, and keys in float16. If the two types differ, llama.cpp computes the attention of each
token in the same way. If both are the same float type, it adds the terms in another order when a step has 64 or more
tokens of a request, or when a request with one token is alone in the step and has more than 256 tokens. The result then
depends on the cached part of the prompt and on other requests. With different types, prompts of 512 and 1,400 tokens
take 1.25 and 1.6 times the CPU time (measured with SmolLM2-135M), and decoding takes the same time."""


class LlamaModel(LoadedModel[AnswerReader]):
    """A model in its process.

    Args:
        slot_files: Keeps the slots of a chat model on disk; None if that is off.
        fields: The parameters of the process, see ``CommonParams``.
        repeats_short: Whether answers with at most ``EXACT_TOKENS`` do not depend on other requests.
        pair_overhead_tokens: Number of tokens that llama.cpp adds to those of a query and a document.
    """

    def __init__(
        self,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        tokenizer: LlamaTokenizer,
        plan: ContextPlan,
        fields: Mapping[str, Any],
        slot_files: SlotFiles | None,
        state_bytes: int,
        batch_invariant: bool,
        repeats_short: bool,
        dimensions: int | None,
        pair_overhead_tokens: int,
    ) -> None:
        entry, self._process = tokenizer.entry, tokenizer.process
        self._slots = self._scorer = None
        if entry.kind == "chat":
            self._scorer = LlamaScorer(tokenizer, plan, fields, host.budget)
            self._slots = LlamaSlots(
                tokenizer,
                plan,
                scorer=self._scorer,
                turns=host.turns,
                slot_files=slot_files,
                state_bytes=state_bytes,
                reserve_bytes=settings.disk_reserve_bytes,
                uses_drafts="speculative_type" in fields,
                is_invariant=batch_invariant,
            )
        fingerprint = f"llama.cpp-{version(PACKAGE)}"
        if entry.copy is not None:
            fingerprint += f"-{entry.copy.type.lower()}-copy"
        if not batch_invariant:
            # Other requests may change the bits of an answer.
            fingerprint += BATCH_DEPENDENT
        super().__init__(
            entry,
            spec,
            settings,
            host,
            fingerprint=fingerprint,
            tokenizer=tokenizer if self._slots is not None else None,
            answers=self._slots.answers if self._slots is not None else None,
            dimensions=dimensions,
            context_length=plan.context_length,
            slots=plan.slots if self._slots is not None else None,
        )
        self.tokenizer = tokenizer
        self._host = host
        self._slot_files = slot_files
        self._repeats_short = repeats_short
        self._pair_overhead_tokens = pair_overhead_tokens
        self._memory_bytes = self._process.memory_bytes
        host.budget.add_process(self._used_bytes)
        self._encoding = asyncio.Lock()
        """Locked while one slice of texts is computed."""
        self._watching: asyncio.Task[None] | None = asyncio.create_task(
            self._watch(), name=f"lmx-lab watches {entry.id}"
        )

    # State

    @property
    def memory_bytes(self) -> int:
        return self._used_bytes()

    def _used_bytes(self) -> int:
        return self._memory_bytes + (self._scorer.memory_bytes if self._scorer is not None else 0)

    @property
    def totals(self) -> TokenTotals:
        totals = super().totals
        if self._slot_files is not None:
            totals.prefix_disk_written_bytes = self._slot_files.written_bytes
        return totals

    # End

    async def _watch(self) -> None:
        """Measure the memory until the process ends unexpectedly, and end the requests then."""
        died, checking = self._process.died, None
        while not died.is_set():
            self._memory_bytes = self._process.memory_bytes or self._memory_bytes
            if checking is None or checking.done():
                # On a thread, because a disk may not respond.
                checking = asyncio.ensure_future(in_thread(functools.partial(is_overwritten, self.entry)))
                checking.add_done_callback(functools.partial(_end_if_overwritten, self._process))
            with contextlib.suppress(TimeoutError):
                # Not ``wait_for``, which continues later than the requests that wait for the same event.
                async with asyncio.timeout(MEASURE_S):
                    await died.wait()
        self._watching = None
        self.lost = death_error(self._process, self.entry.id)
        self._memory_bytes = 0
        log.error("%s", self.lost.message)
        # Before the requests end, so that the state of the manager is up to date for their readers.
        if self._closing is None:
            self._host.lost(self)
        await self._release(self.lost)

    async def _close(self, error: LabError) -> int:
        freed = self._process.memory_bytes
        if self._watching is not None:
            self._watching.cancel()
            # The frame of the task refers to the model, which would otherwise live until the next garbage collection.
            self._watching = None
        await self._release(error)
        self._memory_bytes = 0
        return freed

    async def _release(self, error: LabError) -> None:
        """End the requests and the process. Idempotent."""
        self._host.budget.remove_process(self._used_bytes)
        if self._slots is not None:
            await self._slots.close(error)
        await self._jobs.end(error)
        if self._slot_files is not None:
            await self._slot_files.stop()
        await self._process.stop()
        self.tokenizer.close()

    # Answers

    def fingerprint_of(self, generation: Generation[AnswerReader]) -> str:
        """See ``LoadedModel``."""
        is_short = len(generation.prompt) + generation.max_tokens <= EXACT_TOKENS
        is_exact = self._repeats_short and is_short and is_repeatable(generation)
        return self.fingerprint.removesuffix(BATCH_DEPENDENT) if is_exact else self.fingerprint

    async def _add(self, generations: Sequence[Generation[AnswerReader]]) -> None:
        """See ``LoadedModel``. The prompt is computed separately for each answer."""
        assert self._slots is not None
        for generation in generations:
            generation.peak_memory_bytes = self._memory_bytes
        self._slots.answers.add(generations)
        self._slots.update()

    # Texts

    async def embed(self, request: EmbeddingRequest, permit: Permit) -> asyncio.Task[Embeddings]:
        if request.input_type is not None:
            raise InvalidRequestError(
                "a GGUF file has no prompts for queries and documents; leave out input_type, and write the prompt into "
                "the text",
                param="input_type",
            )
        return await super().embed(request, permit)

    async def _read_texts(
        self, texts: Sequence[str | Sequence[int]], *, input_type: InputType | None, truncate: bool, param: str
    ) -> list[TextTokens]:
        return [
            TextTokens(await self._read(text, param if param == "query" else f"{param}.{at}", truncate=truncate))
            for at, text in enumerate(texts)
        ]

    async def _read_pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[TextTokens]:
        """See ``LoadedModel``. The documents are cut to the length that the query leaves."""
        query_tokens, limit = await self._read(query, "query", truncate=False), self.tokenizer.context_length
        room = limit - len(query_tokens) - self._pair_overhead_tokens
        if room <= 0:
            raise context_error(
                f"query is too long: {len(query_tokens)} tokens leave no room for a document",
                f"{self.entry.id}, including the document and the tokens around both",
                limit,
                "shorten the query",
                param="query",
            )
        pairs = []
        for at, document in enumerate(documents):
            tokens, shown = await self._read(document, f"documents.{at}", truncate=truncate, limit=room), document
            if len(tokens) == room and len(await self._tokenize(document)) > room:
                # The special tokens at both ends are left out.
                shown = await self.tokenizer.decoded(tokens[1:-1])
            pairs.append(TextTokens((*query_tokens, *tokens), pair=(query, shown)))
        return pairs

    async def _beginnings(self, documents: Sequence[str], tokens: int) -> list[str]:
        found = []
        for document in documents:
            ids = await self.tokenizer.tokenize(document, at_most=tokens, parse_special=False, add_special=False)
            found.append(document if len(ids) <= tokens else await self.tokenizer.decoded(ids[:tokens]))
        return found

    async def _read(
        self, text: str | Sequence[int], param: str, *, truncate: bool, limit: int | None = None
    ) -> tuple[int, ...]:
        limit = limit or self.tokenizer.context_length
        if isinstance(text, str):
            check_characters(text, param)
            tokens = await self._tokenize(text)
        else:
            tokens = tuple(text)
            check_token_ids(tokens, param, self.entry, self.tokenizer.vocabulary_size)
        check_text(tokens, param, self.entry, limit, truncate=truncate)
        if len(tokens) <= limit:
            return tokens
        # The last token of a text is often a special one, which the model needs.
        return (*tokens[: limit - 1], tokens[-1]) if isinstance(text, str) else tokens[:limit]

    async def _tokenize(self, text: str) -> tuple[int, ...]:
        at_most = self.tokenizer.context_length
        return tuple(await self.tokenizer.tokenize(text, at_most=at_most, parse_special=False))

    async def _compute(self, job: TextJob) -> Vectors:
        """See ``LoadedModel``. Computes a slice of the texts at a time."""
        # Imported here, because a model is loaded later if numpy is imported first, and only encoders need it.
        import numpy as np

        by_pairs = self.entry.kind == "rerank"
        rows: list[list[float] | float] = []
        for first in range(0, len(job.texts), SLICE):
            part = job.texts[first : first + SLICE]
            async with self._encoding:
                job.start()
                if by_pairs:
                    pairs = [text.pair for text in part if text.pair is not None]
                    query = {"query": pairs[0][0], "documents": [document for _, document in pairs]}
                    found, name = (await self._ask("/v1/rerank", query))["results"], "relevance_score"
                else:
                    body = {"input": [list(text.tokens) for text in part]}
                    found, name = (await self._ask("/v1/embeddings", body))["data"], "embedding"
            rows += [row[name] for row in sorted(found, key=lambda row: int(row["index"]))]
            self.encoded_tokens += sum(len(text.tokens) for text in part)
            self.worked_at = time.perf_counter()
        job.peak_memory_bytes = self._memory_bytes
        computed: Vectors = np.asarray(rows, dtype=np.float32)
        if by_pairs and not job.raw:
            # The activation that sentence-transformers uses for a head with one score, unless a file names another.
            computed = (1 / (1 + np.exp(-computed))).astype(np.float32)
        return computed

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with explained_end(self._process, self.entry.id):
                return await self.tokenizer.connection.post(path, body)
        except RefusedError as exc:
            raise EngineError(f"llama.cpp did not compute these texts: {exc.message}") from exc


def _end_if_overwritten(process: LlamaProcess, checking: asyncio.Future[bool]) -> None:
    """End a process whose file was overwritten: it would use the new data."""
    if not checking.cancelled() and checking.exception() is None and checking.result():
        process.kill_for_overwritten_file()


class LlamaCppEngine:
    """``Engine`` for ``.gguf`` files."""

    blas = None

    def __init__(self, settings: Settings, host: EngineHost) -> None:
        self._settings = settings
        self._host = host
        self._total_bytes = total_bytes()

    @property
    def memory(self) -> EngineMemory:
        return EngineMemory(total=self._total_bytes, limit=self._host.budget.limit_bytes)

    async def plan(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadPlan:
        def plan() -> LoadPlan:
            check_options(entry, spec)
            header, draft = read_gguf(entry.path), read_draft(entry)
            return plan_load(entry, header, limit_bytes=room_bytes, spec=spec, draft=draft)

        return await in_thread(plan, name="lmx-lab-plan")

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> None:
        def check() -> list[str]:
            require_installed(entry.path)
            check_options(entry, spec)
            header = read_gguf(entry.path)
            draft = read_draft(entry)
            plan_context(entry, header, slots=self._settings.slots, limit_bytes=room_bytes, spec=spec, draft=draft)
            return chat_templates(entry) if entry.kind == "chat" else []

        for template in await in_thread(check, name="lmx-lab-check"):
            await try_template(template, entry.path)

    async def load(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LlamaModel:
        """See ``Engine``. Starts a process with the model, and reads the properties of the model from it."""
        settings, budget = self._settings, self._host.budget
        header = await in_thread(functools.partial(read_gguf, entry.path))
        draft = await in_thread(functools.partial(read_draft, entry))
        plan = plan_context(entry, header, slots=settings.slots, limit_bytes=room_bytes, spec=spec, draft=draft)
        fields = _common_params(entry, header, plan, settings, spec=spec)
        if draft is not None:
            prefix = "speculative.draft."
            threads = {name: fields[name] for name in ("cpuparams.n_threads", "cpuparams_batch.n_threads")}
            fields |= {"speculative_type": "DRAFT_SIMPLE", f"{prefix}mparams.path": str(draft.path)}
            fields |= {f"{prefix}{name}": count for name, count in threads.items()}
            fields |= _cache_types(cache_dtype(draft, spec), prefix)
        allowed = min(room_bytes, round(plan.bytes * PLAN_FACTOR))
        state_bytes = prefix_cache_bytes(settings.prefix_cache_bytes, room_bytes)
        max_bytes = max(0, allowed + state_bytes + EXTRA_BYTES)
        # The weights are mapped from the file, and the system can drop them.
        budget.require_free(plan.bytes - entry.load_bytes, entry.id)
        # On a thread, beside the start of the process.
        reading = asyncio.create_task(in_thread(functools.partial(_read_tokenizer, entry)))
        try:
            process = await LlamaProcess.start(
                entry.path,
                fields,
                environ=llama_environ(os.environ, fields["cpuparams.n_threads"]),
                max_bytes=max_bytes,
                free_bytes=lambda: budget.machine_free_bytes,
            )
        except BaseException:
            reading.cancel()
            raise
        try:
            file, chat_format = await reading
            connection = LlamaConnection(process.socket, process.api_key)
            (known,) = (await connection.get("/v1/models"))["data"]
            tokenizer = LlamaTokenizer(
                entry,
                header,
                process,
                connection,
                file=file,
                chat_format=chat_format,
                context_length=plan.context_length,
                vocabulary_size=int(known["meta"]["n_vocab"]),
            )
            if entry.kind == "chat":
                # The first completion takes about 8 ms more than later ones (measured), whatever its length.
                trial = {"prompt": [0], "n_predict": 1, "id_slot": TRIAL_SLOT, "cache_prompt": False}
                with contextlib.suppress(RefusedError):
                    await connection.post("/completion", trial)
            overhead_tokens = 1
            if entry.kind == "rerank" and (pair := header.text("tokenizer.chat_template.rerank")) is not None:
                empty = pair.replace("{query}", "").replace("{document}", "")
                overhead_tokens += len(await tokenizer.tokenize(empty, at_most=len(pair), parse_special=True))
            require_unchanged(entry)
            quantizes_cache = cache_dtype(header, spec) is not None
            return LlamaModel(
                spec,
                settings,
                self._host,
                tokenizer=tokenizer,
                plan=plan,
                fields=fields,
                slot_files=_open_slot_files(tokenizer, fields, settings),
                state_bytes=state_bytes,
                batch_invariant=spec.deterministic or (is_batch_invariant(header) and quantizes_cache),
                repeats_short=is_batch_invariant(header) and sys.platform == "linux",
                dimensions=int(known["meta"]["n_embd"]) if entry.kind != "chat" else None,
                pair_overhead_tokens=overhead_tokens,
            )
        except BaseException as exc:
            reading.cancel()
            await process.stop()
            if isinstance(exc, RefusedError | LabError) and not isinstance(exc, UnusableModelError):
                raise UnusableModelError(f"{entry.path} is loaded by llama.cpp, but does not answer: {exc}") from exc
            raise

    def stop(self) -> None:
        """See ``Engine``. The process of each model has ended with the model."""


def _read_tokenizer(entry: ModelEntry) -> tuple[GgufTokenizer, ChatFormat]:
    """Read the template and the added tokens of a file, and detect its chat format. Blocks.

    Raises:
        UnusableModelError: the file cannot be read, or its template exceeds a limit.
    """
    file = GgufTokenizer(read_header(entry.path, arrays=entry.kind == "chat"))
    if entry.kind != "chat" or not file.has_chat_template:
        return file, ChatFormat()
    try:
        return file, detect_chat_format(file)
    except TemplateLimitError as exc:
        raise UnusableModelError(f"{entry.path} cannot be loaded: its chat template {exc}", param="model") from exc


def _open_slot_files(tokenizer: LlamaTokenizer, fields: Mapping[str, Any], settings: Settings) -> SlotFiles | None:
    if tokenizer.entry.kind != "chat" or settings.prefix_cache_dir is None:
        return None
    # Imported here, because numpy is slow to import, and few servers keep slots on disk.
    from lmx_lab.engine.llama_cpp.slot_files import ARITHMETIC, SlotFiles, can_be_trimmed
    from lmx_lab.engine.prefix_files import PrefixFiles

    if (files := PrefixFiles.of(settings)) is None:
        return None
    versions = [f"{package} {version(package)}" for package in ("lmx-lab", PACKAGE)]
    arithmetic = [*versions, *(f"{name} {fields.get(name)}" for name in ARITHMETIC)]
    files.start(tokenizer.entry, arithmetic)
    trims = can_be_trimmed(tokenizer.header)
    return SlotFiles(files, tokenizer.connection, tokenizer.process.folder, trims=trims)


def _common_params(
    entry: ModelEntry,
    header: GgufHeader,
    plan: ContextPlan,
    settings: Settings,
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
        # Otherwise, llama.cpp would render the template of the file while it loads.
        "chat_template": "chatml",
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
        # llama.cpp would use the states of all callers for each of them; see ``slot_states``.
        "cache_ram_mib": 0,
        "endpoint_slots": True,
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
