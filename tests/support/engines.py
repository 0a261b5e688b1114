"""Run requests on engines, stop the engines at given points, and divide texts into tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest

from lmx_lab.engine import (
    Answer,
    AnswerFormat,
    ChatPrompt,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    ModelManager,
    Ranking,
    RerankRequest,
    Sampling,
    TokenPrompt,
    Tool,
    ToolUse,
)
from lmx_lab.engine.engines import engine_for
from lmx_lab.engine.llama_cpp.engine import LlamaModel
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.engine.memory import Budget
from lmx_lab.engine.model import Engine, EngineHost, LoadedModel
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.engine.scheduler import Permit, Turns
from lmx_lab.engine.speeds import Speeds
from lmx_lab.engine.stream import Mailbox
from lmx_lab.errors import LabError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import ModelState
from lmx_lab.values.models import ECHO, Format, Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.values.outputs import GenerationReport, TokenLogprob, ToolCallDelta
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.fingerprint import with_marks

# Imported by the functions that need it, because it imports mlx-lm, and fast tests import this file.
if TYPE_CHECKING:
    from llguidance import LLMatcher

    from lmx_lab.engine.grammar.compile import GrammarCompiler
    from lmx_lab.engine.mlx.engine import MlxEngine
    from lmx_lab.engine.mlx.loop import GenerationLoop
    from lmx_lab.engine.mlx.thread import MlxThread

T = TypeVar("T")
GREEDY = Sampling(temperature=0)
# Token 2 ends a text; the tiny model's greedy answer to this prompt does not contain it.
PROMPT = TokenPrompt(tokens=(300, 301, 302))


TWO_SLOTS = Settings(slots=2, queue_limit=2)


def mlx_engine(manager: ModelManager) -> MlxEngine:
    from lmx_lab.engine.mlx.engine import MlxEngine

    engine = manager.engines.get("mlx")
    assert isinstance(engine, MlxEngine)
    return engine


def mlx_thread(owner: ModelManager | MlxEngine) -> MlxThread:
    thread = (mlx_engine(owner) if isinstance(owner, ModelManager) else owner)._thread
    assert thread is not None
    return thread


def generating(thread: MlxThread) -> GenerationLoop:
    """Return the loop of the only chat model in memory."""
    (loop,) = thread.room.loops
    return loop


async def load_entry(
    manager: ModelManager, entry: ModelEntry, spec: LoadSpec | None = None, **options: Any
) -> LoadReport:
    """Load a model whose files are known."""
    return await manager.load(spec or LoadSpec(model=entry.id), entry, **options)


@contextlib.asynccontextmanager
async def manager_with(
    entry: ModelEntry, settings: Settings | None = None, *, spec: LoadSpec | None = None, **options: Any
) -> AsyncIterator[ModelManager]:
    """Run a manager with these settings, and load a model whose files are known."""
    async with ModelManager(settings or Settings(), **options) as manager:
        await load_entry(manager, entry, spec)
        yield manager


async def pin(manager: ModelManager, entry: ModelEntry) -> LoadReport:
    """Load a model beside the main one."""
    return await load_entry(manager, entry, LoadSpec(model=entry.id, pin=True))


class Loaded:
    """A model that an engine has loaded, without a manager. Its methods have the names of those of ``ModelManager``,
    and may be called on any event loop.
    """

    def __init__(self, engine: Engine, model: LoadedModel[Any]) -> None:
        self.engine = engine
        self.model = model
        self.entry = model.entry
        self._loop = asyncio.get_running_loop()

    @property
    def snapshot(self) -> ModelState:
        return self.model.state()

    async def generate(self, request: GenerationRequest, choices: int = 1) -> list[Answer]:
        reader = asyncio.get_running_loop()
        return await self._run(lambda permits: self.model.generate(request, permits, reader), choices)

    async def submit(self, request: GenerationRequest) -> Answer:
        (answer,) = await self.generate(request)
        return answer

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        return await (await self._run(lambda permits: self.model.embed(request, permits[0])))

    async def rerank(self, request: RerankRequest) -> Ranking:
        return await (await self._run(lambda permits: self.model.rerank(request, permits[0])))

    async def close(self, error: LabError | None = None) -> int:
        return await self.model.close(error or NotLoadedError("the test has ended"))

    async def _run(self, use: Callable[[Sequence[Permit]], Awaitable[T]], count: int = 1) -> T:
        """Admit a request, and accept it on the loop of the model."""

        async def admit() -> T:
            permits = self.model.admission.admit(count, slot_free_s=lambda: self.model.slot_free_s)
            try:
                return await use(permits)
            except BaseException:
                for permit in permits:
                    permit.release()
                raise

        if asyncio.get_running_loop() is self._loop:
            return await admit()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(admit(), self._loop))


@contextlib.asynccontextmanager
async def engine_alone(format: Format, settings: Settings, *, turns: Turns | None = None) -> AsyncIterator[Engine]:
    """Create an engine of its own on this loop, without a manager."""
    budget, row = Budget(settings.memory_limit_bytes), engine_for(format)
    engine = row.make(settings, EngineHost(budget=budget, turns=turns or Turns()))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def load_on(engine: Engine, entry: ModelEntry, spec: LoadSpec | None = None) -> Loaded:
    """Check and load a model as a manager does, without other models in memory."""
    spec, room_bytes = spec or LoadSpec(model=entry.id), engine.memory.limit
    await engine.check(entry, spec, room_bytes=room_bytes)
    return Loaded(engine, await engine.load(with_marks(entry), spec, room_bytes=room_bytes))


@contextlib.asynccontextmanager
async def loaded(
    entry: ModelEntry, settings: Settings, *, spec: LoadSpec | None = None, turns: Turns | None = None
) -> AsyncIterator[Loaded]:
    """Load a model on an engine of its own, without a manager."""
    async with engine_alone(entry.format, settings, turns=turns) as engine:
        model = await load_on(engine, entry, spec)
        try:
            yield model
        finally:
            await model.close()


def count_ends(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the ends that each stream receives, by the id of its ``steps``."""
    counted: Counter[int] = Counter()
    deliver = Mailbox.deliver

    def count(self: Mailbox, item: Any) -> None:
        counted[id(self.steps)] += isinstance(item, GenerationReport | LabError)
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", count)
    return counted


def request(**changes: Any) -> GenerationRequest:
    return replace(GenerationRequest(prompt=PROMPT, sampling=GREEDY, max_tokens=8), **changes)


def numbers(count: int, *, start: int = 1000) -> TokenPrompt:
    """Return a prompt of ``count`` tokens, beginning with ``start``."""
    return TokenPrompt(tokens=tuple(range(start, start + count)))


async def run(manager: ModelManager | Loaded, **changes: Any) -> tuple[str, GenerationReport]:
    stream = await manager.submit(request(**changes))
    return await finish(stream)


async def finish(stream: Answer) -> tuple[str, GenerationReport]:
    text = "".join([delta.text async for delta in stream])
    assert stream.report is not None
    return text, stream.report


async def finish_with_logprobs(stream: Answer) -> tuple[str, list[TokenLogprob]]:
    deltas = [delta async for delta in stream]
    return "".join(delta.text for delta in deltas), [entry for delta in deltas for entry in delta.logprobs]


async def until_idle(manager: ModelManager | Loaded) -> None:
    # Polled, because the snapshot has no event.
    while manager.snapshot.active_requests + manager.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def until_written(manager: ModelManager, *, files: int = 1) -> AsyncIterator[None]:
    """Wait at the end of the block until this many more files of the prefix cache have been written in it."""
    folder = manager.settings.prefix_cache_dir
    assert folder is not None
    before = len(list(folder.glob("*.safetensors")))
    yield
    async with asyncio.timeout(60):
        while len(list(folder.glob("*.safetensors"))) < before + files:  # noqa: ASYNC110 - another thread writes
            await asyncio.sleep(0.01)


async def until_busy(manager: ModelManager | Loaded, *, requests: int = 1) -> None:
    while manager.snapshot.active_requests + manager.snapshot.queued_requests < requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def engine_paused(manager: ModelManager) -> AsyncIterator[None]:
    """Pause the engine thread within the block. Afterwards it performs all queued commands before its next step."""
    stopped, resume = threading.Event(), threading.Event()

    def stop(_: MlxThread) -> None:
        stopped.set()
        resume.wait()

    mlx_thread(manager).post(stop)
    await asyncio.to_thread(stopped.wait)
    try:
        yield
    finally:
        resume.set()


async def submit_while_paused(manager: ModelManager, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call to a paused engine; return its task when the command is in the queue of the thread."""
    before = mlx_thread(manager)._commands.qsize()
    task = asyncio.create_task(work)
    while mlx_thread(manager)._commands.qsize() == before and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return task


async def fail_next_step(manager: ModelManager, exc: BaseException) -> None:
    """Make the next forward pass raise an error."""

    def break_model(thread: MlxThread) -> None:
        batch = generating(thread).batch
        assert batch is not None

        def fail() -> None:
            weights = batch._model  # in the frame, as in a real forward pass
            assert weights is not None
            raise exc

        batch._generator.next = fail  # type: ignore[method-assign]

    await mlx_thread(manager).call(break_model)


def echo_entry(id_: str, *, context: int = 512, kind: Kind = "chat") -> ModelEntry:
    """Return an entry of the echo engine with the id of a model."""
    return replace(ECHO, id=id_, path=Path("echo") / id_, context_length=context, kind=kind, more_kinds=())


LLAMA_SETTINGS = Settings(slots=2, queue_limit=4, threads=1, memory_limit_bytes=2**30)


def entry_of(path: Path, id_: str = "tiny") -> ModelEntry:
    return replace(Catalog(Settings()).resolve(str(path)), id=id_)


def llama_model(manager: ModelManager, kind: Kind = "chat") -> LlamaModel:
    """Return the model of this kind in memory, which runs on llama.cpp."""
    model = manager.model_for(None, (kind,))
    assert isinstance(model, LlamaModel)
    return model


def process_of(manager: ModelManager) -> LlamaProcess:
    """Return the process of the chat model."""
    return llama_model(manager).tokenizer.process


def system_process_of(owner: ModelManager | LlamaModel) -> psutil.Process:
    process = process_of(owner) if isinstance(owner, ModelManager) else owner.tokenizer.process
    return psutil.Process(process._process.pid)


PLACE_KINDS = ["river", "mountain"]
PLACE_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": PLACE_KINDS}, "wet": {"type": "boolean"}},
    "required": ["kind", "wet"],
    "additionalProperties": False,
}
PLACE_FORMAT = AnswerFormat(kind="json_schema", text=json.dumps(PLACE_SCHEMA))
PLACE_TOOLS = ToolUse(
    tools=(Tool(name="look", parameters=PLACE_SCHEMA, description="Looks."), Tool(name="wait", parameters=PLACE_SCHEMA))
)
ONLY_WAIT = replace(PLACE_TOOLS, forced=True, only="wait")


@dataclass
class FinishedAnswer:
    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    logprobs: list[TokenLogprob]
    report: GenerationReport

    @property
    def reason(self) -> str:
        return self.report.finish_reason


def chat_request(
    *, tools: ToolUse | None = None, bias: dict[int, float] | None = None, content: str = "Where?", **changes: Any
) -> GenerationRequest:
    """Return a request whose answer may contain reasoning; with ``open_thoughts=True`` the prompt opens it.

    A bias outweighs the model, and applies to the first occurrence of a token only.
    """
    names = {"open_thoughts", "enable_thinking"} & set(changes)
    options: dict[str, Any] = {name: changes.pop(name) for name in names}
    prompt = ChatPrompt(messages=({"role": "user", "content": content},), tools=tools, template_options=options)
    biased = Sampling(temperature=0, logit_bias=tuple((bias or {}).items()), presence_penalty=1500 if bias else 0)
    generation = GenerationRequest(prompt=prompt, sampling=biased, max_tokens=100)
    return replace(generation, **changes)


def toward(request: GenerationRequest, tokens: Sequence[int]) -> GenerationRequest:
    """Return the request with a bias that makes its answer begin with these tokens, which must all be different."""
    assert len(set(tokens)) == len(tokens)
    bias = tuple((token, 1000.0 - 20 * at) for at, token in enumerate(tokens))
    return replace(request, sampling=Sampling(temperature=0, logit_bias=bias, frequency_penalty=1000))


async def finish_answer(stream: Answer) -> FinishedAnswer:
    deltas = [delta async for delta in stream]
    assert stream.report is not None
    return FinishedAnswer(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=merge(call for delta in deltas for call in delta.tool_calls)[0],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        report=stream.report,
    )


async def run_chat(manager: ModelManager | Loaded, **changes: Any) -> FinishedAnswer:
    """Return the answer to ``chat_request(**changes)``."""
    return await finish_answer(await manager.submit(chat_request(**changes)))


def is_place(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"kind", "wet"} and value["kind"] in PLACE_KINDS and isinstance(value["wet"], bool)


TOOL_CONVERSATION: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is the river wet?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"kind": "river"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "It is."},
)


def matchers_of(
    compiler: GrammarCompiler, grammar: str, tools: ToolUse | None = None, *, count: int = 1
) -> list[LLMatcher]:
    """Compile a grammar, and wait for its matchers."""
    return shared_pool().portal.run(compiler.matchers(grammar, count, tools))


def merge(deltas: Iterable[ToolCallDelta]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the calls, as names and arguments, and their ids. Only the first delta of a call has id and name."""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(calls)
            assert delta.name
            calls.append((delta.name, delta.arguments))
            ids.append(delta.id)
        else:
            assert (delta.index, delta.name) == (len(calls) - 1, None)
            assert delta.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls, ids


SPEEDS = Speeds(
    model="smollm2-135m",
    measured_at=1_760_000_000.0,
    tokens_per_second={"mlx": 24.2, "llama.cpp": 110.4},
    busy_percent=3.0,
    made_with={},
)
