"""An engine and a lab's server with the same tiny model, and servers of other projects."""

import asyncio
import re
import statistics
from contextlib import aclosing

import pytest

from lmx_lab.bench import runner
from lmx_lab.bench.case import Case
from lmx_lab.bench.targets import ChatTarget, EngineTarget, TargetFacts, as_target
from lmx_lab.engine import ModelManager
from lmx_lab.errors import (
    ConnectionLostError,
    InvalidRequestError,
    LabError,
    ModelNotFoundError,
    NotLoadedError,
    UnauthorizedError,
    UnreachableError,
)
from lmx_lab.settings import Settings
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.model_server import STALL, WORDS, Scripted, chunk, json_answer, token
from tests.support.samples import collect

pytestmark = pytest.mark.anyio
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
SLOTS, QUEUE = 2, 2
TRIES = 4


@pytest.fixture(scope="module")
def lab(tiny_home):
    with serving(tiny_home, "tiny", slots=SLOTS, queue_limit=QUEUE) as lab:
        yield lab


@pytest.fixture(params=["engine", "http"])
def target(request, lab):
    return EngineTarget(manager_of(lab)) if request.param == "engine" else ChatTarget(lab.url)


async def read_chunks(target, **changes):
    async with aclosing(target.ask({**BODY, **changes})) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_lab_describes_what_computes(target, lab):
    facts, blas = await target.describe(), manager_of(lab).snapshot.blas
    assert (facts.model, facts.quantization) == ("tiny", "float32")
    assert (facts.blas, facts.threads) == (blas.name, blas.threads)
    assert facts.device == ("gpu" if blas.name == "unused" else "cpu")
    assert (facts.engine or "").startswith("lmx-lab")


async def test_a_lab_with_llama_cpp_is_described_as_such(tiny_home, tiny_gguf):
    with serving(tiny_home, str(tiny_gguf), threads=1) as lab:
        for target in (EngineTarget(manager_of(lab)), ChatTarget(lab.url)):
            facts = await target.describe()
            assert re.fullmatch(
                r"lmx-lab(, bare| [\d.]+), llama\.cpp-\d+\.\d+\.\d+(-batch-dependent)?", facts.engine or ""
            )
            assert (facts.model, facts.quantization) == (manager_of(lab).snapshot.model, "F32")
            assert facts.blas is None
            chunks = await read_chunks(target, max_tokens=12)
            assert [chunk.usage.completion for chunk in chunks if chunk.usage] == [12]
            assert all(chunk.server.decode_tok_s for chunk in chunks if chunk.server)
        lab.load("tiny")
        for target in (EngineTarget(manager_of(lab)), ChatTarget(lab.url)):
            facts = await target.describe()
            assert "llama" not in (facts.engine or "")
            assert facts.blas


async def test_an_answer_of_the_lab_has_the_requested_length(target):
    await target.describe()
    chunks = await read_chunks(target, max_tokens=100)
    assert not any((chunks[0].tokens, chunks[0].usage, chunks[0].finish_reason))
    moments = [chunk.at_s for chunk in chunks]
    assert moments == sorted(moments)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.completion == 100
    # The last chunk of a choice has the measurements, and that with the usage repeats them.
    first, *repeated = [chunk.server for chunk in chunks if chunk.server]
    assert first.decode_tok_s
    assert all(server == first for server in repeated)


@pytest.mark.long
async def test_metrics_agree_with_the_engines_reports_within_two_percent(target):
    """Compare the median decode rates, which both sides measure.

    The run is repeated, because other programs use this machine. Metrics with different definitions would never agree.
    """
    case = Case(prompt_tokens=64, output_tokens=128, requests=9)
    found = []
    while len(found) < TRIES and not (found and abs(found[-1] - 1) <= 0.02):
        samples = [sample async for sample in runner.samples(target, case) if not sample.warm_up]
        assert {sample.error for sample in samples} == {None}
        assert {sample.output_tokens for sample in samples} == {128}
        assert all(abs((sample.prompt_tokens or 0) - 64) <= 2 for sample in samples)
        found.append(statistics.median(sample.decode_tok_s / sample.server_decode_tok_s for sample in samples))
    assert found[-1] == pytest.approx(1, abs=0.02), found


async def test_a_warm_prompt_is_cached_and_a_cold_one_is_not(target):
    sizes = {"prompt_tokens": 128, "output_tokens": 4, "requests": 3}
    cold = [s async for s in runner.samples(target, Case(**sizes, cache="cold")) if not s.warm_up]
    warm = [s async for s in runner.samples(target, Case(**sizes, cache="warm")) if not s.warm_up]
    # In both cases, all prompts have the beginning of the chat template in common.
    assert max(sample.cached_tokens or 0 for sample in cold) < 40
    assert min(sample.cached_tokens or 0 for sample in warm) > 80


async def test_more_users_than_slots_wait_or_are_refused_and_all_have_samples(target):
    users = 2 * (SLOTS + QUEUE)
    case = Case(prompt_tokens=64, output_tokens=32, concurrency=users, requests=users)
    samples = [sample async for sample in runner.samples(target, case) if not sample.warm_up]
    assert sorted(sample.request for sample in samples) == list(range(users))
    refused = [sample for sample in samples if sample.error]
    assert all((sample.error or "").startswith("queue-full: ") for sample in refused)
    assert 1 <= len(refused) <= users - SLOTS
    assert {sample.output_tokens for sample in samples if not sample.error} == {32}


async def test_closing_an_answer_cancels_it(target, lab):
    before = manager_of(lab).snapshot.totals.output_tokens
    async with aclosing(target.ask({**BODY, "max_tokens": 400})) as chunks:
        async for piece in chunks:
            if piece.tokens:
                break
    await asyncio.to_thread(wait_until_idle, lab)
    assert manager_of(lab).snapshot.totals.output_tokens - before < 400


async def test_without_a_model_a_target_raises(tiny_home):
    async with ModelManager(Settings(home=tiny_home)) as manager:
        with pytest.raises(NotLoadedError):
            await EngineTarget(manager).describe()
        samples = await collect(
            runner.samples(EngineTarget(manager), Case(prompt_tokens=8, output_tokens=4, requests=1))
        )
    assert {(sample.error or "").partition(":")[0] for sample in samples} == {"no-model-loaded"}
    with serving(tiny_home, None) as empty, pytest.raises(NotLoadedError):
        await ChatTarget(empty.url).describe()


# --- servers of other projects


@pytest.mark.parametrize(
    ("given", "models", "sent"),
    [
        (None, ("a",), "a"),
        ("b", ("a", "b"), "b"),
        (None, (), "default"),
        (None, json_answer({"detail": "no such route"}, status=404), "default"),
        ("b", json_answer({"detail": "no such route"}, status=404), "b"),
    ],
)
async def test_the_model_of_a_request(given, models, sent):
    with Scripted(WORDS, models=models) as server:
        await read_chunks(ChatTarget(server.url, model=given))
        assert [body["model"] for body in server.bodies] == [sent]


@pytest.mark.parametrize("lab", [False, True])
@pytest.mark.parametrize("model", [None, "b"])
@pytest.mark.parametrize("status", [404, 500])
async def test_models_that_a_server_cannot_list_are_requested_once(model, lab, status):
    """Another request before each chat would delay what is measured. Labs give full and deterministic answers."""
    with Scripted(WORDS, models=json_answer({"error": "no list"}, status=status), lab=lab) as server:
        target = ChatTarget(server.url, model=model)
        for _ in range(3):
            await read_chunks(target)
    assert server.paths.count("/v1/models") == 1
    fields = (True, 0) if lab else (None, None)
    assert [(body.get("ignore_eos"), body.get("temperature")) for body in server.bodies] == [fields] * 3


async def test_a_server_with_several_models_needs_a_model_name():
    with Scripted(WORDS, models=[f"m{number}" for number in range(8)]) as server:
        with pytest.raises(InvalidRequestError, match=r"lists 8 models \(m0, m1, m2, m3, m4 and 3 more\)"):
            await read_chunks(ChatTarget(server.url))
        assert server.bodies == []


@pytest.mark.parametrize(
    ("models", "model", "error", "message"),
    [
        pytest.param((), None, ModelNotFoundError, "model=", id="no models"),
        pytest.param(json_answer({"error": "no cache"}, status=500), None, LabError, "no cache", id="no list"),
        pytest.param(
            json_answer({"error": {"message": "no such key"}}, status=401),
            "b",
            UnauthorizedError,
            "no such key",
            id="wrong key",
        ),
    ],
)
async def test_a_server_without_a_list_of_models_needs_a_model_name_and_the_right_key(models, model, error, message):
    with Scripted(WORDS, models=models) as server, pytest.raises(error, match=message):
        await ChatTarget(server.url, model=model).describe()


async def test_an_unreachable_server_is_an_error_even_with_a_model_name():
    for model in ("b", None):
        with pytest.raises(UnreachableError, match="nothing answers at"):
            await ChatTarget("127.0.0.1:1", model=model).describe()


@pytest.mark.parametrize(
    ("models", "model", "expected"),
    [(("scripted",), None, "scripted"), (json_answer({"error": "no cache"}, status=500), "b", "b")],
    ids=["listed", "no list"],
)
async def test_facts_that_a_server_does_not_report_can_be_given(models, model, expected):
    known = TargetFacts(engine="other 1.0", device="gpu")
    with Scripted(WORDS, models=models) as server:
        target = ChatTarget(server.url, model=model, name="other", known=known, extra={"ignore_eos": True})
        assert await target.describe() == TargetFacts(engine="other 1.0", model=expected, device="gpu")
        await read_chunks(target)
    assert server.bodies[0]["ignore_eos"] is True


@pytest.mark.parametrize("end", [[], [STALL]], ids=["closed", "open"])
async def test_a_stream_without_done_is_complete_after_the_finish_reason(end):
    with Scripted([token("a"), chunk({}, finish="stop"), *end]) as server:
        chunks = await read_chunks(ChatTarget(server.url, max_open_s=0.05))
        await server.until(lambda: server.left == len(end))
    assert [piece.finish_reason for piece in chunks] == [None, None, "stop"]


async def test_a_stream_that_ends_without_a_finish_reason_is_an_error():
    with Scripted([token("a")]) as server, pytest.raises(ConnectionLostError, match="before the answer was complete"):
        await read_chunks(ChatTarget(server.url))


async def test_a_json_document_instead_of_a_stream_is_one_piece():
    message = {"role": "assistant", "content": "hello"}
    document = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }
    with Scripted(json_answer(document)) as server:
        _, whole = await read_chunks(ChatTarget(server.url))
    assert (whole.tokens, whole.finish_reason, whole.usage.completion) == (1, "stop", 5)


def test_a_key_is_never_shown():
    target = ChatTarget("http://127.0.0.1:1", api_key="secret")
    assert "secret" not in f"{target!r} {target.name}"


def test_an_invalid_target_is_refused(lab):
    for wrong, message in ((3, "address"), ("ftp://nowhere", "ftp://nowhere"), (lab, r"call its method bench\(\)")):
        with pytest.raises(InvalidRequestError, match=message):
            as_target(wrong)
    assert as_target("127.0.0.1:8400").name == "127.0.0.1:8400"


async def test_an_unknown_model_of_a_lab_is_not_replaced_by_the_loaded_one(lab):
    with pytest.raises(NotLoadedError, match="nope"):
        await ChatTarget(lab.url, model="nope").describe()
