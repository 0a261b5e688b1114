"""The planned memory is that of the loaded model, for each kind of KV cache on both engines, also before a download."""

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models.cache import make_prompt_cache

from lmx_lab.engine import ModelManager
from lmx_lab.engine.llama_cpp.memory_plan import BASE_BYTES
from lmx_lab.engine.llama_cpp.process import SCRIPT, LlamaProcess
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.load import load_chat
from lmx_lab.engine.plan import FitList
from lmx_lab.engine.speeds import BANDWIDTH_FILE, memory_bandwidth
from lmx_lab.errors import ModelNotFoundError, OutOfMemoryError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, ModelState
from lmx_lab.values.models import LoadSpec, Unloading
from lmx_lab.values.plan import LargestContext, LayerCache, LoadPlan, find_room, kv_bytes_per_token, kv_constant_bytes
from lmx_lab.weights import hub_download
from tests.support.engines import entry_of, load_entry, numbers, run
from tests.support.gguf import GGUF_FAMILIES, write_gguf_family
from tests.support.hub import Hub, failing, instead
from tests.support.models import (
    MLX_FAMILIES,
    SMALL,
    TINY_ENTRY,
    write_huge_llama,
    write_mlx_model,
    write_tiny_bert,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
MIB = 2**20
TOKENS = 2048
"""Number of tokens of the measured requests: more than each window, and a multiple of the step of the caches."""


async def plan(path, folder, **options):
    """Return the plan of a model at a path."""
    spec = LoadSpec(model=str(path), **options)
    return await ModelManager(Settings(home=folder / "home", slots=2)).plan(spec)


def near(expected):
    return pytest.approx(expected, rel=0.05)


@pytest.fixture
def tiny_two(tiny):
    return entry_of(tiny.path.with_name("tiny-two"))


# Measured memory


def measure_mlx(path):
    """Return the memory of the weights and of the caches after ``TOKENS`` tokens, as MLX allocates it."""
    try:
        before = mx.get_active_memory()
        weights, _ = load_chat(entry_of(path), limit_bytes=2**33)
        loaded = mx.get_active_memory()
        cache = make_prompt_cache(weights.model)
        for length in [512] * (TOKENS // 512 - 1) + [511, 1]:
            weights.model(mx.array([[1] * length]), cache=cache)
            # Without the logits, which take longest.
            mx.eval([layer.state for layer in cache])
        return loaded - before, mx.get_active_memory() - loaded
    finally:
        del weights
        memory.end_thread()


@pytest.mark.parametrize("family", MLX_FAMILIES)
async def test_mlx_uses_the_planned_memory(tmp_path, smollm2, family):
    path = tmp_path / family
    await asyncio.to_thread(write_mlx_model, path, SMALL | MLX_FAMILIES[family], smollm2.path)
    planned = await plan(path, tmp_path)
    weights_bytes, kv_bytes = await asyncio.to_thread(measure_mlx, path)
    assert planned.engine == "mlx"
    assert planned.weights_bytes == near(weights_bytes)
    assert planned.kv_bytes_per_token * TOKENS + planned.kv_constant_bytes == near(kv_bytes)


async def measure_llama_cpp(monkeypatch, path, folder, **options):
    """Return the memory of the weights and of the caches that llama.cpp allocates for a load, by its log, and the
    tokens and the number of slots.
    """
    started = []

    async def note(path, fields, **_):
        started.append(fields)
        raise UnusableModelError("noted")

    monkeypatch.setattr(LlamaProcess, "start", note)
    with pytest.raises(UnusableModelError, match="noted"):
        await load_entry(ModelManager(Settings(slots=2)), entry_of(path), LoadSpec(model="m", **options))
    (fields,) = started
    everything_logged = {"fields": {**fields, "model.path": str(path), "verbosity": 6}}
    limits = {"api_key": "key", "socket": str(folder / "llama.sock"), "data_bytes": 2**33}
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(SCRIPT), str(folder / "sockets"), str(os.getpid())],
        input=json.dumps({**everything_logged, **limits}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    def size(pattern):
        found = re.findall(rf"{pattern} buffer size = +([\d.]+) MiB", ended.stderr)
        assert found, ended.stderr[-2000:]
        return sum(map(float, found)) * MIB

    return size("model"), size("(?:KV|RS)"), fields["n_ctx"], fields["n_parallel"]


@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, {}) for family in GGUF_FAMILIES), ("wide-heads", {"kv_cache_dtype": "q8_0"})],
)
async def test_llama_cpp_allocates_the_planned_memory(monkeypatch, tmp_path, smollm2_gguf, family, options):
    path = write_gguf_family(tmp_path / f"{family}.gguf", smollm2_gguf, family)
    planned = await plan(path, tmp_path, context_length=TOKENS, **options)
    weights_bytes, kv_bytes, tokens, slots = await measure_llama_cpp(
        monkeypatch, path, tmp_path, context_length=TOKENS, **options
    )
    assert (planned.engine, tokens, slots) == ("llama.cpp", 3 * TOKENS, 3)
    assert planned.weights_bytes == near(weights_bytes)
    assert slots * (planned.kv_bytes_per_token * TOKENS + planned.kv_constant_bytes) == near(kv_bytes)


async def test_the_plans_of_loads_on_mlx_share_a_thread(tmp_path, tiny):
    async with ModelManager(Settings(home=tmp_path)) as manager:
        counts = []
        for _ in range(6):
            await manager.load(LoadSpec(model=str(tiny.path)))
            await manager.unload()
            counts.append(psutil.Process().num_threads())
        # Threads of a pool may be added, but not one for each plan.
        assert counts[-1] - counts[1] < 3, counts


async def test_an_encoder_has_weights_and_no_cache(tmp_path, minilm):
    folder = write_tiny_bert(tmp_path / "bert").path
    planned = await plan(folder, tmp_path)
    assert (planned.kind, planned.kv_bytes_per_token, planned.contexts) == ("embedding", 0, ())
    async with ModelManager(Settings()) as manager:
        for path in (folder, minilm.path):
            loaded = await manager.load(LoadSpec(model=str(path)))
            assert (await plan(path, tmp_path)).weights_bytes == near(loaded.memory_bytes)
    assert planned.tokens_per_second is None


# The largest context


@pytest.fixture(params=["mlx", "gguf"])
async def grouped(request, tmp_path, smollm2, smollm2_gguf):
    """The path of a model with grouped queries, and a memory limit with which its context is shorter than its own."""
    path = tmp_path / "grouped"
    if request.param == "gguf":
        write_gguf_family(path.with_suffix(".gguf"), smollm2_gguf, "grouped-queries")
        return path.with_suffix(".gguf"), BASE_BYTES + 66 * MIB
    await asyncio.to_thread(write_mlx_model, path, SMALL | MLX_FAMILIES["grouped-queries"], smollm2.path)
    return path, 48 * MIB


@pytest.mark.usefixtures("no_shared_model")
async def test_the_largest_context_runs_and_a_larger_one_is_refused_before_the_load(grouped):
    path, limit_bytes = grouped
    async with ModelManager(Settings(slots=8, memory_limit_bytes=limit_bytes)) as manager:
        planned = await manager.plan(LoadSpec(model=str(path)))
        largest = {it.requests: it.context_length for it in planned.contexts}
        assert 1000 < largest[1] < 32_768
        assert largest[8] < largest[4] < largest[1]
        report = await manager.load(LoadSpec(model=str(path), context_length=largest[1]))
        assert report.context_length == largest[1]
        prompt = numbers(largest[1] - 4)
        assert (await run(manager, prompt=prompt, max_tokens=4, ignore_eos=True))[1].output_tokens == 4
        # The model in memory still answers, and no weights have been read.
        with pytest.raises(OutOfMemoryError, match="choose a smaller context_length"):
            await manager.load(LoadSpec(model=str(path), context_length=round(1.1 * largest[1])))
        assert manager.snapshot.context_length == largest[1]
        for count in (4, 8):
            report = await manager.load(LoadSpec(model=str(path), context_length=largest[count]))
            assert report.slots >= count


async def test_a_model_without_room_for_a_request_has_no_context(tmp_path, tiny, tiny_gguf):
    for path in (tiny.path, tiny_gguf):
        planned = await ModelManager(Settings(memory_limit_bytes=MIB)).plan(LoadSpec(model=str(path)))
        assert (planned.fits, {it.context_length for it in planned.contexts}) == ("not-here", {0})
        assert "does not fit here" in str(planned)
        assert "too little memory for 8 requests" in str(planned)


# The verdict


def state(name, memory_bytes, idle_since=None, **changes):
    entry = replace(TINY_ENTRY, id=name)
    return ModelState(entry=entry, memory_bytes=memory_bytes, idle_since=idle_since, **changes)


OLD, NEW, PINNED = state("old", 30, 1.0), state("new", 30, 2.0), state("pinned", 20, pinned=True)
BUSY, LEAVING = state("busy", 30), state("leaving", 30, unloading=Unloading(answers_left=1, seconds_left=9))


@pytest.mark.parametrize(
    ("needed", "models", "surplus", "expected"),
    [
        (100, [], 0, ("now", ())),
        (101, [], 1, ("not-here", ())),
        (20, [NEW, PINNED, OLD], 1, ("now", ())),
        # The least recently used model leaves first, and no more than are in the way.
        (50, [NEW, PINNED, OLD], 0, ("after-unloading", ("old",))),
        (51, [NEW, PINNED, OLD], 0, ("after-unloading", ("old", "new"))),
        # Unless too many would be in memory.
        (50, [NEW, PINNED, OLD], 2, ("after-unloading", ("old", "new"))),
        # A model that answers leaves last, and one that is being unloaded leaves anyway.
        (41, [BUSY, OLD], 0, ("after-unloading", ("old",))),
        (71, [BUSY, OLD], 0, ("after-unloading", ("old", "busy"))),
        (41, [OLD, LEAVING], 0, ("after-unloading", ("leaving",))),
        # A pinned model stays.
        (81, [NEW, PINNED, OLD], 0, ("not-here", ())),
    ],
)
def test_models_leave_until_there_is_room(needed, models, surplus, expected):
    assert find_room(needed, 100, models, surplus=surplus) == expected


@pytest.mark.usefixtures("no_shared_model")
async def test_the_models_in_memory_decide_what_fits(tmp_path, tiny, tiny_two, minilm, tiny_gguf):
    planned = await plan(tiny.path, tmp_path)
    limit_bytes = planned.needed_bytes + minilm.size_bytes + MIB
    async with ModelManager(Settings(memory_limit_bytes=limit_bytes, home=tmp_path)) as manager:

        async def verdict(entry):
            planned = await manager.plan(LoadSpec(model=str(entry.path)))
            return planned.fits, planned.unload

        assert await verdict(tiny) == ("now", ())
        await load_entry(manager, minilm)
        assert await verdict(tiny) == ("now", ())
        await load_entry(manager, tiny)
        assert await verdict(minilm) == ("now", ())
        # A model in memory makes room for itself.
        assert await verdict(tiny) == ("now", ())
        await load_entry(manager, minilm)
        await manager.load(LoadSpec(model=str(minilm.path), pin=True))
        await load_entry(manager, tiny)
        assert await verdict(tiny_two) == ("after-unloading", ("tiny",))
        # The pinned embedding model stays.
        assert await verdict(entry_of(tiny_gguf)) == ("not-here", ())


@pytest.mark.usefixtures("no_shared_model")
async def test_the_models_that_a_plan_names_leave_for_the_load(tmp_path, tiny):
    first, second, third, fourth = [
        LoadSpec(model=str(shutil.copytree(tiny.path, tmp_path / name)))
        for name in ("first", "second", "third", "fourth")
    ]
    alone = await plan(tiny.path, tmp_path)
    limit_bytes = alone.needed_bytes + 2 * alone.weights_bytes + MIB
    async with ModelManager(Settings(memory_limit_bytes=limit_bytes, resident="auto", home=tmp_path)) as manager:
        for spec in (first, second, third):
            assert (await manager.plan(spec)).fits == "now"
            await manager.load(spec)
        # The second one is now the model that was used least recently.
        await manager.load(first)
        planned = await manager.plan(fourth)
        assert (planned.fits, planned.unload) == ("after-unloading", (second.model,))
        await manager.load(fourth)
        assert {model.entry.id for model in manager.models} == {first.model, third.model, fourth.model}


async def test_a_list_shows_which_models_fit_and_is_read_within_a_time_limit(tmp_path, tiny, tiny_gguf):
    manager = ModelManager(Settings(home=tmp_path))
    manager.engines.get("mlx")
    huge, gguf = write_huge_llama(tmp_path / "huge", tiny.path), entry_of(tiny_gguf)
    broken = replace(tiny, path=tmp_path / "absent")
    entries = [tiny, gguf, huge, broken]
    expected = {tiny.path: "now", gguf.path: "now", huge.path: "not-here"}
    assert await FitList(manager.engines, limit_s=60).read(entries, manager.snapshot) == expected
    late = FitList(manager.engines, limit_s=0)
    assert await late.read(entries, manager.snapshot) == {}
    # What was read once is kept.
    assert await manager.fits.read([gguf], manager.snapshot) == {gguf.path: "now"}
    # In a smaller memory, another model has to leave for it.
    others = EngineSnapshot(models=(replace(OLD, memory_bytes=10**12),))
    assert await manager.fits.read([gguf], others) == {gguf.path: "after-unloading"}


# Options


async def test_options_change_the_plan(tmp_path, smollm2_gguf, tiny, tiny_two):
    path = write_gguf_family(tmp_path / "m.gguf", smollm2_gguf, "wide-heads")
    plain, quantized = [await plan(path, tmp_path, kv_cache_dtype=dtype) for dtype in (None, "q8_0")]
    assert quantized.kv_bytes_per_token * 64 == plain.kv_bytes_per_token * 34
    short, long = [await plan(path, tmp_path, context_length=tokens) for tokens in (256, 4096)]
    assert long.needed_bytes - short.needed_bytes == 2 * (4096 - 256) * plain.kv_bytes_per_token
    drafted = await plan(tiny.path, tmp_path, draft=str(tiny_two.path))
    alone = await plan(tiny.path, tmp_path)
    assert drafted.weights_bytes == 2 * alone.weights_bytes
    assert drafted.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    # On a CPU, numbers are float32 unless another type is set.
    halved = await ModelManager(Settings(dtype="float16", home=tmp_path)).plan(LoadSpec(model=str(tiny.path)))
    assert halved.weights_bytes * 2 == alone.weights_bytes


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"context_length": 513}, "context_length"),
        ({"deterministic": True}, "deterministic"),
        ({"kv_cache_dtype": "q8_0"}, "kv_cache_dtype"),
        ({"engine": "llama.cpp"}, "engine"),
        ({"draft": "/nowhere"}, "draft"),
    ],
)
async def test_options_that_a_load_would_refuse_are_refused(tmp_path, tiny, options, param):
    with pytest.raises((UnusableModelError, ModelNotFoundError)) as refused:
        await plan(tiny.path, tmp_path, **options)
    assert refused.value.param == param


async def test_only_the_used_experts_are_read_for_a_token(tmp_path, smollm2, smollm2_gguf):
    await asyncio.to_thread(write_mlx_model, tmp_path / "experts", SMALL | MLX_FAMILIES["experts"], smollm2.path)
    path = write_gguf_family(tmp_path / "experts.gguf", smollm2_gguf, "experts")
    # Gate, up and down of each expert, of which a quarter and a half are used.
    for planned, unread in (
        (await plan(tmp_path / "experts", tmp_path), 4 * 8 * 3 * 32 * 32 * 4 * 6 / 8),
        (await plan(path, tmp_path), 4 * 4 * 3 * 64 * 96 * 4 / 2),
    ):
        assert planned.weights_bytes - planned.read_bytes == pytest.approx(unread, rel=0.01)


# Bandwidth


async def test_the_bandwidth_is_measured_once_per_machine(tmp_path):
    settings = Settings(home=tmp_path)
    rate = memory_bandwidth(settings)
    assert rate > 10**8
    stored = json.loads((tmp_path / BANDWIDTH_FILE).read_text())
    assert stored["bytes_per_s"] == {"CPU": rate}
    assert memory_bandwidth(settings) == rate
    assert memory_bandwidth(settings, "Metal", lambda: 5e9) == 5e9
    assert [memory_bandwidth(settings, device) for device in ("CPU", "Metal")] == [rate, 5e9]
    # With another number of threads, it is measured again.
    assert memory_bandwidth(replace(settings, threads=3), "Metal", lambda: 6e9) == 6e9
    (tmp_path / BANDWIDTH_FILE).write_text("[]")
    assert memory_bandwidth(settings, "CPU", lambda: 7e9) == 7e9


# Models on the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return a function that makes a local server with these files the hub."""
    real, cache = hub_download.fetch_headers, tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    with contextlib.ExitStack() as servers:

        def serve(files, **faults):
            server = servers.enter_context(Hub(files))
            server.faults |= faults
            monkeypatch.setattr(hub_download, "fetch_headers", functools.partial(real, endpoint=server.url))
            return server

        yield serve
        assert not cache.exists()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_model_on_the_hub_has_the_same_plan_before_its_download(hub, tmp_path, tiny, tiny_gguf):
    big = bytes(10 * MIB)
    for files, local, asked in (
        ({**files_of(tiny.path), "README.md": b"text", "code.py": b"x"}, tiny.path, "model.safetensors"),
        # The header of the GGUF file, which has the vocabulary, is longer than what is read first.
        ({"tiny-Q8_0.gguf": tiny_gguf.read_bytes() + big, "tiny-Q4_0.gguf": big}, tiny_gguf, "tiny-Q8_0.gguf"),
    ):
        server = hub(files)
        name = "org/tiny" if local == tiny.path else "org/tiny:Q8_0"
        there, here = await plan(name, tmp_path), await plan(local, tmp_path)
        grown = there.file_bytes - here.file_bytes
        assert (there.on_disk, here.on_disk, there.model) == (False, True, name)
        # The limit depends on what else this process uses.
        unnamed = {"model": "", "on_disk": True, "file_bytes": 0, "limit_bytes": 0}
        assert replace(there, needed_bytes=there.needed_bytes - grown, **unnamed) == replace(here, **unnamed)
        assert all(wanted.startswith("bytes=0-") for _, wanted in server.requests)
        assert {name for name, _ in server.requests} <= {asked, "config.json", "README.md"}
        # The weights were not read.
        last = max(int(wanted.partition("-")[2]) for file, wanted in server.requests if file == asked)
        assert last < len(files[asked]) / 2


async def test_a_plan_of_a_model_on_the_hub_uses_no_disk_space(hub, tmp_path, tiny):
    huge = write_huge_llama(tmp_path / "huge", tiny.path)
    with (huge.path / "model.safetensors").open("rb") as file:
        start = file.read(2**18)

    class Announced(bytes):
        """Content of which only the start exists."""

        def __len__(self):
            return huge.size_bytes

    server = hub({**files_of(tiny.path), "config.json": (huge.path / "config.json").read_bytes()})
    server.files["model.safetensors"] = Announced(start)
    server.faults["model.safetensors"] = lambda handler, _: handler.reply(start)
    there, here = await plan("org/tiny", tmp_path), await plan(huge.path, tmp_path)
    assert (there.weights_bytes, there.fits) == (here.weights_bytes, "not-here")
    assert there.weights_bytes > 60 * 10**9


def lying_header(content):
    """Return a safetensors file whose header states that its tensors are larger."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    last = max((it for name, it in header.items() if name != "__metadata__"), key=lambda it: it["data_offsets"])
    last["data_offsets"][1] += 4 * math.prod(last["shape"][1:])
    last["shape"][0] += 1
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"model.safetensors": lying_header}, UnusableModelError, r"org/tiny/model.safetensors is truncated"),
        ({"model.safetensors": lambda _: b"\xff" * 1000}, UnusableModelError, "truncated or not a safetensors file"),
        ({"model.safetensors": None}, UnusableModelError, r"no model\*\.safetensors and no \.gguf"),
        ({"config.json": lambda _: b'{"model_type": "zzzzz"}'}, UnusableModelError, "zzzzz"),
        ({"tokenizer.json": None}, UnusableModelError, "org/tiny contains no tokenizer"),
    ],
)
async def test_a_model_on_the_hub_that_no_engine_runs_is_refused(hub, tmp_path, tiny, *, change, error, reason):
    files = files_of(tiny.path)
    for name, make in change.items():
        content = files.pop(name)
        if make is not None:
            files[name] = make(content)
    hub(files)
    with pytest.raises(error, match=reason):
        await plan("org/tiny", tmp_path)


async def test_a_model_that_is_nowhere_is_not_found(hub, tmp_path, tiny):
    hub(files_of(tiny.path))
    for name, reason in (
        ("org/absent", "the hub has no model org/absent"),
        ("org/tiny:Q4_0", r"no \.gguf model"),
        ("absent", "there is no model 'absent' on disk"),
        # A starter is not on the hub.
        ("smollm2-135m", "run `lmx-lab pull smollm2-135m`"),
    ):
        with pytest.raises((ModelNotFoundError, UnusableModelError), match=reason):
            await plan(name, tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no model 'org/tiny' on disk"):
        await ModelManager(Settings(home=tmp_path, downloads=False)).plan(LoadSpec(model="org/tiny"))


async def test_a_hub_that_fails_is_an_error_with_its_reason(hub, tmp_path, tiny):
    for fault in (failing, instead(b"short")):
        hub(files_of(tiny.path), **{"model.safetensors": fault})
        with pytest.raises(ModelNotFoundError, match=r"org/tiny is not on disk: .* could not be downloaded"):
            await plan("org/tiny", tmp_path)


# Bad input


async def test_a_header_that_states_another_size_is_refused(tmp_path, tiny, tiny_gguf):
    folder, file = shutil.copytree(tiny.path, tmp_path / "short"), shutil.copy(tiny_gguf, tmp_path / "short.gguf")
    for path, weights in ((folder, folder / "model.safetensors"), (file, file)):
        os.truncate(weights, weights.stat().st_size - 1000)
        with pytest.raises(UnusableModelError, match=r"is truncated: it has \d+ bytes, and \d+ by its header"):
            await plan(path, tmp_path)


async def test_a_model_that_no_engine_runs_is_refused(tmp_path, tiny):
    folder = shutil.copytree(tiny.path, tmp_path / "unknown")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "zzzzz"}))
    with pytest.raises(UnusableModelError, match="zzzzz"):
        await plan(folder, tmp_path)


async def test_a_caller_on_another_machine_names_neither_paths_nor_models_of_the_hub(tmp_path, tiny):
    manager = ModelManager(Settings(home=tmp_path))
    for name in (str(tiny.path), "org/tiny"):
        with pytest.raises(ModelNotFoundError):
            await manager.plan(LoadSpec(model=name), local=False)


# Display


def test_a_plan_is_displayed_as_a_table():
    layers = [LayerCache(bytes_per_token=1024), LayerCache(bytes_per_token=512, window_tokens=1000, chunk_tokens=512)]
    plan = LoadPlan(
        model="org/<name>",
        engine="mlx",
        kind="chat",
        on_disk=False,
        file_bytes=2_000_000_000,
        weights_bytes=4_000_000_000,
        kv_bytes_per_token=kv_bytes_per_token(layers),
        kv_constant_bytes=kv_constant_bytes(layers),
        needed_bytes=4_100_000_000,
        context_length=8192,
        contexts=(
            LargestContext(requests=1, context_length=8192),
            LargestContext(requests=4, context_length=None),
            LargestContext(requests=8, context_length=0),
        ),
        tokens_per_second=7.25,
        limit_bytes=6_000_000_000,
        fits="after-unloading",
        unload=("one", "two"),
    )
    assert str(plan).splitlines() == [
        "org/<name> on mlx",
        "verdict          fits after unloading one, two",
        "memory           4.10 GB needed, 6.00 GB allowed",
        "weights          4.00 GB in memory, 2.00 GB of files",
        "KV cache         1 kB for each token of a request, 512 kB for each request",
        "largest context  8,192 tokens for 1 request, any number of tokens for 4 requests, too little memory for "
        "8 requests",
        "decoding         at most about 7.2 tokens/s",
        "files            not on the disk; headers read from the hub",
    ]
    assert repr(plan) == str(plan)
    assert "org/&lt;name&gt; on mlx" in plan._repr_html_()
