"""Tests that after a fault anywhere in an engine, every request ends once, and the next request is answered."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
import pytest
from mlx_lm.models import llama

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.llama_cpp.completion import AnswerReader
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.slots import LlamaSlots
from lmx_lab.engine.llama_cpp.tokenizer import LlamaTokenizer
from lmx_lab.engine.mlx import batch, memory
from lmx_lab.engine.mlx import tokenizer as mlx_tokenizer
from lmx_lab.engine.mlx.sampling import RandomSampler
from lmx_lab.engine.mlx.tokenizer import MlxTokenizer
from lmx_lab.errors import EngineError
from lmx_lab.settings import Settings
from tests.support.asking import CHAT_WAIT_S, refused
from tests.support.engines import (
    fail_next_step,
    finish,
    manager_with,
    mlx_thread,
    numbers,
    process_of,
    request,
    run,
    until_idle,
)
from tests.support.formats import Chat, Problem, Request, Socket
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

DIGITS = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": "^[0-9]{60}$"}}}


@dataclass(frozen=True, kw_only=True)
class FaultPoint:
    """The function and the call at which a fault is injected, and the parameters of requests that reach it."""

    at: tuple[Any, str]
    call: int
    fields: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    """Whether only one request fails, and not the others that run at the same time."""
    exc: Exception = field(default_factory=lambda: RuntimeError("injected"))


def inject(monkeypatch, place, exc, *, at_call):
    """Raise an error at one call of a function, because no real model fails on demand, and forward all other calls.

    Args:
        place: A module or class, and the name of the function in it.

    Returns:
        A function that returns whether the error was raised.
    """
    real, calls = getattr(*place), 0

    def faulty(*args, **options):
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise exc
        return real(*args, **options)

    monkeypatch.setattr(*place, faulty)
    return lambda: calls >= at_call


MLX_PLACES = {
    "tokenizing": FaultPoint(at=(MlxTokenizer, "encode"), call=1, alone=True),
    "prefill": FaultPoint(at=(llama.Model, "__call__"), call=1),
    "decoding": FaultPoint(at=(llama.Model, "__call__"), call=9),
    "sampling": FaultPoint(at=(RandomSampler, "sample"), call=5, fields={"temperature": 0.7, "seed": 3}),
    "grammar mask": FaultPoint(at=(Constraint, "mask"), call=5, fields={"response_format": DIGITS}),
    "detokenizing": FaultPoint(at=(mlx_tokenizer, "_decode"), call=31, alone=True),
    "log-probabilities": FaultPoint(at=(batch, "answer_token"), call=15, alone=True, fields={"logprobs": True}),
}
GGUF_PLACES = {
    "tokenizing": FaultPoint(at=(LlamaTokenizer, "tokenize"), call=1, alone=True),
    "reading": FaultPoint(at=(AnswerReader, "read"), call=5, alone=True),
    "llama.cpp": FaultPoint(
        at=(LlamaSlots, "_generate"), call=1, alone=True, exc=RefusedError(500, "server_error", "injected")
    ),
}
PLACES = {"mlx": MLX_PLACES, "gguf": GGUF_PLACES}


WAYS = {"whole": (Chat(), False), "streamed": (Chat(), True), "by_socket": (Socket(), True)}
"""The format of a request, and whether its answer is streamed."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one request; exactly one of ``text`` and ``problem`` is set."""

    text: str | None = None
    problem: Problem | None = None
    status: int | None = None
    """HTTP status; None if the answer is streamed or sent over a WebSocket."""


def answer_of(lab, way, request):
    """Send a request, and return how it ended."""
    form, stream = WAYS[way]
    with httpx2.Client(base_url=lab.url, timeout=CHAT_WAIT_S) as http:
        if way == "by_socket":
            frames = form.frames(form.streamed(http, request))
        else:
            response = http.post(form.path, json=form.body(request, stream=stream))
            if response.status_code != 200:
                return End(problem=form.problem(response.json()), status=response.status_code)
            if not stream:
                return End(text=form.answer(response.json()).text, status=200)
            frames = form.frames(response.text)
    *parts, last = frames
    return End(problem=form.problem(last)) if "error" in last else End(text=form.partial_text(parts))


def send_all(lab, ways, request):
    """Send one request for each way at the same time, without waiting for the responses."""
    pool = ThreadPoolExecutor(len(ways))
    futures = [pool.submit(answer_of, lab, way, request) for way in ways]
    pool.shutdown(wait=False)
    return futures


@pytest.fixture(scope="module")
def labs(tiny_home, tiny_gguf):
    """Run a server for each engine."""
    with (
        serving(tiny_home, "tiny", slots=2, queue_limit=4) as mlx,
        serving(tiny_home, str(tiny_gguf), slots=2, queue_limit=4, threads=1) as gguf,
    ):
        yield {"mlx": mlx, "gguf": gguf}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in PLACES.items() for name in names])
def test_a_fault_ends_requests_with_an_error_and_queued_ones_are_answered(labs, monkeypatch, engine, name, way):
    lab, place = labs[engine], PLACES[engine][name]
    request = Request(max_tokens=24, extra=place.fields)
    good = answer_of(lab, way, request)
    assert good.text
    with monkeypatch.context() as patched:
        has_happened = inject(patched, place.at, place.exc, at_call=place.call)
        # Two requests run, and one waits.
        ends = [future.result(CHAT_WAIT_S) for future in send_all(lab, [way] * 3, request)]
    assert has_happened()
    failed = [end for end in ends if end.problem is not None]
    assert 1 <= len(failed) <= (1 if place.alone else 2)
    assert [end.text for end in ends if end.problem is None] == [good.text] * (3 - len(failed))
    for end in failed:
        assert (end.problem.code, end.problem.kind) == ("internal-error", "server_error")
        assert "injected" in end.problem.message
        assert end.status in (None, 500)
    wait_until_idle(lab)
    assert answer_of(lab, way, request) == good
    assert httpx2.get(f"{lab.url}/readyz").status_code == 200


# After faults


FORM = AnswerFormat(kind="regex", text="[0-9]{200}")


@pytest.mark.anyio
async def test_failed_requests_leave_no_objects_and_memory(tiny, monkeypatch):
    made = weakref.WeakSet()
    begin = Constraint.__init__

    def noted(self, *args):
        made.add(self)
        begin(self, *args)

    monkeypatch.setattr(Constraint, "__init__", noted)

    async def fail_once(manager, call):
        requests = [request(prompt=numbers(100, start=at), max_tokens=200, answer_format=FORM) for at in (500, 900)]
        with monkeypatch.context() as patched:
            has_happened = inject(patched, (llama.Model, "__call__"), RuntimeError("injected"), at_call=call)
            for stream in [await manager.submit(each) for each in requests]:
                with pytest.raises(EngineError, match="injected"):
                    await finish(stream)
        assert has_happened()
        await until_idle(manager)

    others = set(threading.enumerate())

    def own_threads():
        # Programs that other tests share can start threads meanwhile, but those do not have the names of an engine's.
        return sorted(each.name for each in set(threading.enumerate()) - others if each.name.startswith("lmx-lab-"))

    # Without a prefix cache, which keeps memory of ended requests.
    async with manager_with(tiny, Settings(slots=2, queue_limit=2, prefix_cache_bytes=0)) as manager:
        seen = []
        for at in range(6):
            await fail_once(manager, call=20 + at)
            gc.collect()
            seen.append((await used_bytes(manager), own_threads(), len(made)))
        assert seen[-1] == seen[2], seen
        assert "lmx-lab-engine" in seen[-1][1]
        assert seen[-1][2] == 0
        assert (await run(manager))[1].output_tokens == 8


async def used_bytes(manager):
    """Return the memory that MLX uses, without its cache of free buffers."""
    await mlx_thread(manager).call(lambda _: memory.release())
    return await mlx_thread(manager).call(lambda _: memory.used_bytes())


# The engine dies


@pytest.mark.parametrize("made_for", ["mlx", "gguf"])
def test_requests_end_when_their_engine_dies_and_a_load_starts_it_again(tiny_home, long_gguf, made_for):
    # Longer on llama.cpp, where requests might end before all three run at once.
    name, tokens = ("tiny", 450) if made_for == "mlx" else (str(long_gguf), 7000)
    with (
        serving(tiny_home, name, slots=3, threads=1) as lab,
        httpx2.Client(base_url=lab.url, timeout=CHAT_WAIT_S) as http,
    ):
        before = manager_of(lab).snapshot.totals.output_tokens
        futures = send_all(lab, [*WAYS], Request(max_tokens=tokens, extra={"ignore_eos": True}))
        until(lambda: manager_of(lab).snapshot.active_requests == 3)
        until(lambda: manager_of(lab).snapshot.totals.output_tokens > before)
        if made_for == "mlx":
            asyncio.run(fail_next_step(manager_of(lab), SystemExit("injected")))
        else:
            psutil.Process(process_of(manager_of(lab))._process.pid).kill()
        for way, future in zip(WAYS, futures, strict=True):
            end = future.result(CHAT_WAIT_S)
            assert end.problem.code == "internal-error"
            assert "load a model" in end.problem.message
            assert (end.status, end.problem.retryable) == (503 if way == "whole" else None, False)
        refused(Chat().post(http, Request()), 503, "internal-error")
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200
        assert http.post("/admin/models/load", json={"model": name}).status_code == 200
        assert http.get("/readyz").status_code == 200
        assert Chat().post(http, Request()).status_code == 200
