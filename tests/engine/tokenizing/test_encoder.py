"""Texts are encoded in this process or in a sandbox process, with the same tokens, and within limits."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tokenizers import Regex, Tokenizer, normalizers

from lmx_lab.engine.tokenizing import encoder as module
from lmx_lab.engine.tokenizing.encoder import CancelledTextError, TextEncoder, TextWork
from lmx_lab.engine.tokenizing.worker import NICENESS
from lmx_lab.errors import InvalidRequestError, QueueFullError
from tests.support.waiting import until

pytestmark = pytest.mark.slow
TEXTS = ("", "Hello  world!\n", "<|im_start|>user\nhi<|im_end|>", "[CLS] 東京 naïve 🦊 [SEP]", "\x00\x04\t", " " * 300)


def tokenizer_of(entry):
    tokenizer = Tokenizer.from_file(str(entry.path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sandboxed(tokenizer):
    """An encoder that encodes all texts in its process."""
    # A pattern that matches nothing, and is not one of the known ones.
    old = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*old, normalizers.Replace(Regex("\\z."), "")])
    encoder = TextEncoder(tokenizer, "tiny")
    assert not encoder.is_bounded
    return encoder


@pytest.fixture
def slow(smollm2):
    """An encoder whose process takes many seconds for ``SLOW_TEXT``."""
    tokenizer = tokenizer_of(smollm2)
    tokenizer.normalizer = normalizers.Replace(Regex("(a|a)*c"), "")
    return TextEncoder(tokenizer, "slow")


# 2**17 attempts at each of the positions, which is below the limit at which the library panics.
SLOW_TEXT = ("a" * 17 + "d") * 20_000 + "c"


def test_the_process_returns_the_same_tokens(smollm2, minilm):
    variants = [{}, {"special": False}, {"truncation": (5, "longest_first")}, {"starts": True}]
    for entry in (smollm2, minilm):
        here, there = TextEncoder(tokenizer_of(entry), "here"), sandboxed(tokenizer_of(entry))
        for options in variants:
            expected = here.encode(TEXTS, TextWork(), **options)
            assert there.encode(TEXTS, TextWork(), **options) == expected, (entry.id, options)


def test_the_process_returns_the_same_tokens_of_pairs(minilm):
    pairs = [("query", text) for text in TEXTS]
    here, there = TextEncoder(tokenizer_of(minilm), "here"), sandboxed(tokenizer_of(minilm))
    assert here.encode(pairs, TextWork(), keep=9) == there.encode(pairs, TextWork(), keep=9)


def test_a_long_text_of_a_bounded_tokenizer_is_encoded_in_the_process(smollm2):
    tokenizer, text = tokenizer_of(smollm2), "one two " * 10_000
    encoder = TextEncoder(tokenizer, "tiny")
    (encoded,) = encoder.encode([text], TextWork(), keep=100)
    assert encoder._sandbox._process.starts == 1
    ids = tokenizer.encode(text).ids
    assert (encoded.ids, encoded.length) == (ids[:100], len(ids))


def test_a_text_over_the_time_limit_is_refused(slow, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 1.0)
    with pytest.raises(InvalidRequestError, match="takes longer than the limit of 1 s for messages") as caught:
        slow.encode([SLOW_TEXT], TextWork(), param="messages")
    assert caught.value.param == "messages"
    assert slow.encode(["hello"], TextWork())[0].ids


def test_a_panic_is_an_error_of_the_request(smollm2):
    tokenizer = tokenizer_of(smollm2)
    tokenizer.normalizer = normalizers.Replace(Regex("(a|a|aa|b)*c"), "")
    with pytest.raises(InvalidRequestError, match="PanicException"):
        TextEncoder(tokenizer, "tiny").encode(["a" * 400 + "dc"], TextWork(), param="prompt")


def start(encode):
    errors = []

    def run():
        try:
            encode()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_a_cancelled_text_ends_while_it_is_encoded(slow):
    work = TextWork()
    thread, errors = start(lambda: slow.encode([SLOW_TEXT], work))
    until(lambda: slow._sandbox._running is work)
    work.cancel()
    thread.join(60)
    assert [type(error) for error in errors] == [CancelledTextError]
    assert slow._sandbox._running is None


@pytest.mark.long
def test_a_text_gives_way_to_a_short_one(slow, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 5.0)
    work = TextWork()
    thread, errors = start(lambda: slow.encode([SLOW_TEXT], work))
    until(lambda: slow._sandbox._running is work)
    assert slow.encode(["hello"], TextWork())[0].ids
    assert work.gave_way
    thread.join(60)
    assert [type(error) for error in errors] == [QueueFullError]


def test_the_process_of_a_bounded_tokenizer_ends_when_it_is_idle(smollm2, monkeypatch):
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    encoder = TextEncoder(tokenizer_of(smollm2), "tiny")
    encoder.encode(["one two " * 10_000], TextWork())
    until(lambda: not encoder._sandbox._process.is_running)


def test_the_process_ends_with_the_encoder(smollm2):
    encoder = sandboxed(tokenizer_of(smollm2))
    encoder.encode(["hello"], TextWork())
    process = encoder._sandbox._process
    del encoder
    until(lambda: not process.is_running)


def test_only_the_process_has_a_low_priority(smollm2):
    own = os.nice(0)
    encoder = sandboxed(tokenizer_of(smollm2))
    encoder.encode(["hello"], TextWork())
    process = encoder._sandbox._process._process
    assert psutil.Process(process.pid).nice() == max(own, NICENESS)
    program = "import os; import lmx_lab.engine.tokenizing.encoder; print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == own


def test_files_of_the_worker_need_nothing_of_the_package():
    assert "lmx_lab" not in Path(module.WORKER).read_text()
