"""Tests of the estimates of memory, of the memory limit, which MLX shares with other engines, and of the memory of an
NVIDIA GPU, which MLX alone uses. The GPU is simulated by what MLX reports about it.
"""

import asyncio
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine import EmbeddingRequest, TraceRequest
from lmx_lab.engine import memory as machine
from lmx_lab.engine.memory import LEAST_BYTES, Budget
from lmx_lab.engine.mlx import kv_cache, memory
from lmx_lab.engine.mlx.engine import MlxEngine
from lmx_lab.engine.mlx.kv_cache import UNBOUNDED_TOKENS, Footprint
from lmx_lab.engine.model import EngineHost
from lmx_lab.errors import ContextLengthError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.plan import LayerCache
from lmx_lab.values.tracing import Activations
from lmx_lab.weights.fingerprint import with_marks
from tests.support.engines import finish, load_entry, manager_with, numbers, request, run
from tests.support.waiting import WAIT_S, auntil

GB = 10**9
LIMIT = GB
H100 = {"device_name": "NVIDIA H100 80GB HBM3", "free_memory": 70 * GB, "total_memory": 80 * GB}


def report_device(monkeypatch, info):
    device = SimpleNamespace(
        device_info=lambda: info, get_active_memory=lambda: 3 * GB, get_cache_memory=lambda: 2 * GB
    )
    device.set_memory_limit = lambda limit: info.update(limit=limit)
    monkeypatch.setattr(memory, "mx", device)


def test_the_memory_limit_is_80_percent_of_what_other_programs_leave_of_the_gpu(monkeypatch):
    report_device(monkeypatch, info := dict(H100))
    assert (memory.total_bytes(), memory.limit_bytes(None), memory.limit_bytes(5)) == (80 * GB, 60 * GB, 5)
    memory.limit_kept_bytes(60 * GB)
    assert info["limit"] == 60 * GB
    report_device(monkeypatch, {**H100, "free_memory": 79 * GB})
    assert memory.limit_bytes(None) == 64 * GB
    report_device(monkeypatch, {"memory_size": 32 * GB})
    assert (memory.total_bytes(), memory.is_of_device()) == (32 * GB, False)
    report_device(monkeypatch, {"device_name": "cpu"})
    assert (memory.total_bytes(), memory.is_of_device()) == (machine.total_bytes(), False)


class PausedLoads(Budget):
    """A budget that lets loads wait before they read weights while ``may_read`` is not set."""

    reading = threading.Event()
    may_read = threading.Event()

    def require_free(self, needed_bytes, name):
        self.reading.set()
        assert self.may_read.wait(WAIT_S)


class SharedMemory:
    """An MLX engine with a chat model and an embedding model, and the memory that other engines use."""

    def __init__(self):
        self.others, self.lost = 0, []
        self.data, self.evicted, self.models = 0, [], []
        # The footprint of this process depends on the tests before.
        self.budget = PausedLoads(
            LIMIT,
            weights=lambda: sum(model.memory_bytes for model in self.models),
            footprint=lambda: memory.used_bytes() + self.data,
            evict=self.evicted.append,
        )
        self.budget.may_read.set()
        self.budget.add_process(lambda: self.others)
        host = EngineHost(budget=self.budget, lost=lambda *lost: self.lost.append(lost))
        self.engine = MlxEngine(Settings(slots=2), host)

    async def load(self, entry):
        entry = with_marks(entry)
        model = await self.engine.load(entry, LoadSpec(model=entry.id), room_bytes=LIMIT)
        self.models.append(model)
        return model

    async def start(self, chat=None, **changes):
        chat, reader = chat or self.chat, asyncio.get_running_loop()
        (stream,) = await chat.generate(request(prompt=numbers(50), **changes), chat.admission.admit(1), reader)
        return stream

    async def answer(self, chat=None):
        return (await finish(await self.start(chat)))[1]

    async def most_running(self):
        """Send two requests, and return how many of them were computed at the same time."""
        streams = [await self.start(max_tokens=100, ignore_eos=True) for _ in range(2)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        begun = [stream.report is None for stream in streams]
        assert [(await finish(stream))[1].output_tokens for stream in streams] == [100, 100]
        return sum(begun)

    async def embed(self):
        (permit,) = self.embedder.admission.admit(1)
        return await (await self.embedder.embed(EmbeddingRequest(inputs=("sea",)), permit))

    async def trace(self):
        (permit,) = self.chat.admission.admit(1)
        work = Activations(hooks=("logits",))
        return await (await self.chat.trace(TraceRequest(prompt=numbers(5), work=work), permit))


@pytest.fixture
async def shared_memory(no_shared_model, tiny, minilm):
    shared = SharedMemory()
    shared.chat, shared.embedder = await shared.load(tiny), await shared.load(minilm)
    yield shared
    shared.engine.stop()


@pytest.mark.anyio
async def test_cached_prefixes_are_dropped_when_other_engines_need_their_memory(shared_memory):
    assert [(await shared_memory.answer()).cached_tokens for _ in range(2)] == [0, 49]
    shared_memory.others = LIMIT
    assert (await shared_memory.answer()).cached_tokens == 0


@pytest.mark.anyio
async def test_the_oldest_prefix_of_all_models_is_dropped_first(shared_memory, tiny):
    first, second = shared_memory.chat, await shared_memory.load(tiny)
    await shared_memory.answer(first)
    await shared_memory.answer(second)
    kept = first.prefix_cache_bytes
    assert kept == second.prefix_cache_bytes > 0
    # A use counts.
    await shared_memory.answer(first)
    shared_memory.others = LIMIT - memory.used_bytes() + kept // 2
    shared_memory.budget.update()
    await auntil(lambda: second.prefix_cache_bytes == 0)
    assert first.prefix_cache_bytes == kept
    assert shared_memory.evicted == []


@pytest.mark.anyio
async def test_requests_wait_for_each_other_while_other_data_of_the_process_needs_memory(shared_memory):
    assert await shared_memory.most_running() == 2
    # What models may use in any case is used by another process.
    shared_memory.data, shared_memory.others = LIMIT, LEAST_BYTES
    assert await shared_memory.most_running() == 1
    # Idle models should make room for the request that waits.
    assert shared_memory.evicted
    assert min(shared_memory.evicted) > 0


@pytest.mark.anyio
async def test_requests_leave_the_memory_of_a_model_that_is_being_loaded(shared_memory, smollm2):
    shared_memory.others = round(0.4 * LIMIT)
    assert await shared_memory.most_running() == 2
    budget = shared_memory.budget
    budget.reading.clear()
    budget.may_read.clear()
    loading = asyncio.create_task(shared_memory.load(smollm2))
    assert await asyncio.to_thread(budget.reading.wait, WAIT_S)
    assert await shared_memory.most_running() == 1
    budget.may_read.set()
    assert (await loading).memory_bytes > LIMIT // 2
    assert await shared_memory.most_running() == 1


@pytest.mark.anyio
async def test_memory_far_above_the_limit_unloads_the_model(shared_memory):
    loaded, used = shared_memory.chat.memory_bytes, memory.used_bytes()
    shared_memory.others = round(1.2 * LIMIT)
    with pytest.raises(OutOfMemoryError, match="unloaded"):
        await shared_memory.answer()
    assert memory.used_bytes() < used - 0.95 * loaded
    assert shared_memory.chat.memory_bytes == 0
    await auntil(lambda: shared_memory.lost == [(shared_memory.chat,)])
    with pytest.raises(OutOfMemoryError, match="tiny was unloaded"):
        await shared_memory.answer()


@pytest.mark.anyio
async def test_texts_and_traces_that_do_not_fit_beside_other_engines_are_refused(shared_memory):
    shared_memory.others = LIMIT
    for work in (shared_memory.embed, shared_memory.trace):
        with pytest.raises(ContextLengthError, match=r"in addition to the 1\.\d\d GB in use, and 1\.00 GB are allowed"):
            await work()
    shared_memory.others = 0
    await shared_memory.embed()
    await shared_memory.trace()


class Shrinking(Budget):
    """A budget on a machine whose free memory is taken by other programs when it has been read often enough."""

    reads = 0
    machine_free_bytes = property(lambda self: self.read())

    def read(self):
        self.reads -= 1
        # Enough for the tiny model.
        return 10**12 if self.reads >= 0 else 10**8


@pytest.mark.anyio
@pytest.mark.usefixtures("no_shared_model")
@pytest.mark.parametrize("reads", [pytest.param(0, id="before"), pytest.param(1, id="while")])
async def test_a_load_whose_memory_is_taken_by_other_programs_restores_the_previous_model(reads, tiny, smollm2):
    budget = Shrinking(None)
    budget.reads = 10**6
    async with manager_with(tiny, Settings(), budget=budget) as manager:
        budget.reads = reads
        message = (
            r"(?s)smollm2-135m needs 0\.\d\d GB more, and of the 0\.10 GB that are free .*; the previous model tiny is"
        )
        with pytest.raises(OutOfMemoryError, match=message):
            await load_entry(manager, smollm2)
        assert (await run(manager, max_tokens=4))[1].output_tokens == 4
        budget.reads = 10**6
        await load_entry(manager, smollm2)


def test_models_on_a_gpu_have_a_limit_of_their_own(monkeypatch):
    for info, is_of_device in ((dict(H100), True), ({"device_name": "cpu"}, False)):
        report_device(monkeypatch, info)
        budget = Budget(LIMIT, footprint=lambda: 3 * GB)
        engine = MlxEngine(Settings(), EngineHost(budget=budget))
        assert engine.memory.is_of_device is is_of_device
        assert engine.memory.limit == (60 * GB if is_of_device else budget.limit_bytes)
        # Engines on the CPU do not count it.
        assert budget.used_bytes == (0 if is_of_device else 3 * GB)


def test_products_are_exact_and_any_number_of_shapes_is_allowed():
    names = ("MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_ENABLE_TF32")
    assert [os.environ[name] for name in names] == ["0", "0"]


@pytest.mark.parametrize(
    ("dtype", "head_size", "stored"), [(mx.float32, 64, True), (mx.bfloat16, 256, True), (mx.bfloat16, 128, False)]
)
def test_scores_that_cudnn_cannot_compute_in_one_kernel_use_memory(monkeypatch, dtype, head_size, *, stored):
    layer = SimpleNamespace(keys=mx.zeros((1, 1, 1, head_size), dtype=dtype))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(memory, "is_of_device", lambda: True)
    assert kv_cache.stores_scores([layer, object()]) is stored
    monkeypatch.setattr(memory, "is_of_device", lambda: False)
    assert not kv_cache.stores_scores([layer])


MIB = 2**20
FULL = LayerCache(bytes_per_token=1024)
SLIDING = LayerCache(bytes_per_token=1024, window_tokens=512)
STATE = LayerCache(fixed_bytes=MIB)
MODEL = Footprint(
    weights_bytes=100 * MIB,
    layers=(FULL,) * 4,
    logits_bytes=4096,
    chunk_bytes_per_token=4096,
    score_bytes_per_pair=72,
)


def test_a_batch_pads_every_request_to_the_longest():
    assert MODEL.kv_bytes([1000, 10]) == 2 * 1024 * 4 * 1024
    assert MODEL.kv_bytes([]) == 0


def test_caches_with_a_window_or_a_fixed_size_stop_growing():
    model = replace(MODEL, layers=(SLIDING, STATE))
    assert model.kv_bytes([100_000]) == 512 * 1024 + MIB


def test_a_draft_model_has_one_cache_as_long_as_the_longest_request():
    model = replace(MODEL, draft_layers=(FULL, FULL))
    for lengths in ([1000], [1000, 10]):
        more = model.running_bytes(lengths, chunk=1) - MODEL.running_bytes(lengths, chunk=1)
        assert more == 2 * 1024 * 1024
    assert model.longest_request(200 * MIB, chunk=1) < MODEL.longest_request(200 * MIB, chunk=1)


@given(st.integers(0, 2**33), st.integers(1, 2048))
def test_the_longest_request_fits_and_one_token_more_does_not(limit_bytes, chunk):
    longest = MODEL.longest_request(limit_bytes, chunk=chunk)
    if longest:
        assert MODEL.running_bytes([longest], chunk=min(chunk, longest)) <= limit_bytes
    assert MODEL.running_bytes([longest + 1], chunk=min(chunk, longest + 1)) > limit_bytes


def test_memory_does_not_limit_the_context_of_a_model_whose_state_does_not_grow():
    model = replace(MODEL, layers=(STATE,), score_bytes_per_pair=0)
    assert model.longest_request(2**33, chunk=512) == UNBOUNDED_TOKENS
