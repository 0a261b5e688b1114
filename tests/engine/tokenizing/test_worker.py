"""The worker of the tokenizer sandbox returns what the tokenizer computes. It is called in this process."""

import os
from array import array

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lmx_lab.engine.tokenizing import worker
from lmx_lab.engine.tokenizing.worker import NICENESS, pack, unpack

OPTIONS = {"pairs": False, "truncation": None, "starts": False, "special": True, "keep": None}


def ask(header, data=b""):
    answer, ids = unpack(worker.handle(pack(header, data)))
    return answer, array("I", bytes(ids)).tolist()


def encode(*texts, **options):
    data = [text.encode() for text in texts]
    return ask({"sizes": [len(text) for text in data], **OPTIONS, **options}, b"".join(data))


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    """Send a tokenizer of words, whose texts begin with token 0 and whose pairs have two segments."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "naïve": 2, "sea": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 0)]
    )
    increments = []
    # The priority of this process must not change.
    monkeypatch.setattr(os, "nice", lambda increment: increments.append(increment) or 0)
    assert worker.handle(pack({"build": True}, tokenizer.to_str().encode())) == b""
    assert increments == [0, NICENESS]


def test_texts_are_encoded_one_after_the_other():
    assert encode("naïve sea", "", "sea") == ({"lengths": [3, 1, 2], "seconds": [None] * 3}, [0, 2, 3, 0, 0, 3])
    assert encode("sea sea", special=False, keep=1) == ({"lengths": [2], "seconds": [None]}, [3])
    # Each token is followed by the position of its first character.
    assert encode("naïve sea", starts=True)[1] == [0, 2, 3, 0, 0, 6]


def test_pairs_are_truncated_and_have_a_second_segment():
    options = {"pairs": True, "truncation": (4, "only_second")}
    assert encode("sea", "naïve sea sea", **options) == ({"lengths": [4], "seconds": [2]}, [0, 3, 2, 3])
    # The truncation applies only to the request that states it.
    assert encode("sea", "naïve sea sea", pairs=True)[0]["lengths"] == [5]


def test_an_error_is_returned():
    answer, _ = encode("sea", pairs=True)
    assert "zip() argument 2 is shorter" in answer["error"]


def test_the_tokenizer_of_a_folder_is_loaded_and_timed(smollm2):
    assert ask({"load": str(smollm2.path)})[0]["load_s"] > 0
