"""Texts are encoded in this process or in a sandbox, with the same tokens, and within limits."""

import asyncio
import os

import psutil
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers

from lmx_lab.engine.sandbox import SandboxPool
from lmx_lab.engine.tokenizing.encoder import TextEncoder, find_unbounded_part, find_unbounded_step
from lmx_lab.engine.tokenizing.worker import NICENESS
from lmx_lab.errors import EngineError, InvalidRequestError, QueueFullError
from tests.support.asking import invalid
from tests.support.programs import run_script
from tests.support.waiting import auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TEXTS = ("", "Hello  world!\n", "<|im_start|>user\nhi<|im_end|>", "[CLS] 東京 naïve 🦊 [SEP]", "\x00\x04\t", " " * 300)
# 2**17 attempts at each of the positions, which is below the limit at which the library panics.
SLOW_TEXT = ("a" * 17 + "d") * 20_000 + "c"


@pytest.fixture(scope="module")
def pool():
    pool = SandboxPool()
    yield pool
    pool.close()


@pytest.fixture
def own_pool():
    pool = SandboxPool(idle_s=0.05)
    yield pool
    pool.close()


def tokenizer_of(entry):
    tokenizer = Tokenizer.from_file(str(entry.path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sandboxed(tokenizer, pool):
    """An encoder that encodes all texts in its process."""
    # A pattern that matches nothing, and is not one of the known ones.
    old = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*old, normalizers.Replace(Regex("\\z."), "")])
    encoder = TextEncoder(tokenizer, "tiny", pool=pool)
    assert not encoder.is_bounded
    return encoder


def slow_encoder(entry, pool, limit_s):
    """An encoder whose process takes many seconds for ``SLOW_TEXT``."""
    tokenizer = tokenizer_of(entry)
    tokenizer.normalizer = normalizers.Replace(Regex("(a|a)*c"), "")
    return TextEncoder(tokenizer, "slow", limit_s=limit_s, pool=pool)


async def test_the_process_returns_the_same_tokens(smollm2, minilm, pool):
    variants = [{}, {"special": False}, {"truncation": (5, "longest_first")}, {"starts": True}]
    for entry in (smollm2, minilm):
        here, there = TextEncoder(tokenizer_of(entry), "here"), sandboxed(tokenizer_of(entry), pool)
        for options in variants:
            assert await there.encode(TEXTS, **options) == await here.encode(TEXTS, **options), (entry.id, options)
        assert await there.encode([]) == []


async def test_the_process_returns_the_same_tokens_of_pairs(minilm, pool):
    pairs = [("query", text) for text in TEXTS]
    here, there = TextEncoder(tokenizer_of(minilm), "here"), sandboxed(tokenizer_of(minilm), pool)
    assert await here.encode(pairs, keep=9) == await there.encode(pairs, keep=9)


async def test_a_long_text_of_a_bounded_tokenizer_is_encoded_in_a_process_that_ends_when_it_is_idle(smollm2, own_pool):
    tokenizer, text = tokenizer_of(smollm2), "one two " * 10_000
    encoder = TextEncoder(tokenizer, "tiny", pool=own_pool)
    await encoder.encode(["short"])
    assert own_pool.starts == 0
    (encoded,) = await encoder.encode([text], keep=100)
    assert own_pool.starts == 1
    ids = tokenizer.encode(text).ids
    assert (encoded.ids, encoded.length) == (ids[:100], len(ids))
    await auntil(lambda: own_pool.pids == [])


async def test_a_text_over_the_time_limit_is_refused(smollm2, pool):
    slow = slow_encoder(smollm2, pool, 1.0)
    with invalid("messages", "takes longer than the limit of 1 s for messages"):
        await slow.encode([SLOW_TEXT], param="messages")
    assert (await slow.encode(["hello"]))[0].ids


@pytest.mark.long
async def test_slow_texts_delay_no_other_and_the_second_has_to_wait(smollm2, own_pool):
    slow = slow_encoder(smollm2, own_pool, 6.0)
    texts = [asyncio.create_task(slow.encode([SLOW_TEXT])) for _ in range(2)]
    await auntil(lambda: own_pool.starts == 2)
    assert (await slow.encode(["hello"]))[0].ids
    assert not any(text.done() for text in texts)
    ends = await asyncio.gather(*texts, return_exceptions=True)
    assert [type(end) for end in ends] == [InvalidRequestError, QueueFullError]
    assert ends[1].retry_after_s == 2


async def test_a_panic_is_an_error_of_the_request(smollm2):
    tokenizer = tokenizer_of(smollm2)
    tokenizer.normalizer = normalizers.Replace(Regex("(a|a|aa|b)*c"), "")
    with pytest.raises(InvalidRequestError, match="PanicException"):
        await TextEncoder(tokenizer, "tiny").encode(["a" * 400 + "dc"], param="prompt")


async def test_a_process_that_ends_is_an_error_of_the_request(smollm2, own_pool):
    slow = slow_encoder(smollm2, own_pool, 60.0)
    text = asyncio.create_task(slow.encode([SLOW_TEXT], param="prompt"))
    await auntil(lambda: bool(own_pool.pids))
    (process,) = map(psutil.Process, own_pool.pids)
    # Wait until the process encodes the text: imports and building the tokenizer take less CPU time than this.
    await auntil(lambda: process.nice() >= NICENESS and process.cpu_times().user > 1.5)
    process.kill()
    with pytest.raises(InvalidRequestError, match="has ended the process in which it ran; send less than prompt"):
        await text


async def test_a_process_that_cannot_be_started_is_an_error_of_the_engine(smollm2):
    pool = SandboxPool(start_s=0.0)
    with pytest.raises(EngineError, match="no process could be started for the tokenizer of tiny"):
        await sandboxed(tokenizer_of(smollm2), pool).encode(["hello"])
    pool.close()


async def test_the_process_has_a_low_priority(smollm2, own_pool):
    encoder = sandboxed(tokenizer_of(smollm2), own_pool)
    await encoder.encode(["hello"])
    (pid,) = own_pool.pids
    assert psutil.Process(pid).nice() == max(os.nice(0), NICENESS)


def test_importing_the_encoder_does_not_change_the_priority():
    program = "import os; import lmx_lab.engine.tokenizing.encoder; print(os.nice(0))"
    assert int(run_script(program)) == os.nice(0)


# Whether the time of the steps of a tokenizer is bounded


@pytest.mark.parametrize(
    ("step", "part"),
    [
        ({"type": "Replace", "pattern": {"Regex": "(a|a|aa|b)*c"}, "content": ""}, "regular expression"),
        ({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}, "regular expression"),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}, "times as long"),
        ({"type": "Unheard-of"}, "of the type Unheard-of"),
    ],
)
def test_a_step_without_a_bound_is_named(step, part):
    assert part in (find_unbounded_step([{"type": "NFC"}, step]) or "")


def test_many_small_replacements_have_no_bound():
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    assert find_unbounded_step([step] * 5) is None
    assert find_unbounded_step([step] * 10) is not None


def test_the_tokenizers_of_the_starter_models_are_bounded(smollm2, minilm):
    for entry in (smollm2, minilm):
        assert find_unbounded_part(Tokenizer.from_file(str(entry.path / "tokenizer.json"))) is None


def test_a_word_piece_model_with_endless_words_is_not_bounded():
    model = models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)
    assert find_unbounded_part(Tokenizer(model)) is not None
