"""Test records, repetition and scoring with models: on MLX and on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lmx_lab
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, ModelEntry

TEXT = "<|im_start|>user\nHi \N{GRINNING FACE} 你好<|im_end|>\n<|im_start|>assistant\nThe sea is wide."
"""Text with special tokens, one of which ends answers, and with characters of several tokens."""


@pytest.fixture(scope="module", params=["mlx", "gguf"])
def lab(
    request: pytest.FixtureRequest, tiny: ModelEntry, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lmx_lab.Lab]:
    paths: dict[Format, Path] = {"mlx": tiny.path, "gguf": tiny_gguf}
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=2, threads=1)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load(paths[request.param])
        yield lab


def test_seeded_and_greedy_requests_repeat_exactly(lab: lmx_lab.Lab) -> None:
    for options in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}):
        lab.chat("Say something.", max_tokens=12, ignore_eos=True, **options)
        replay = lab.requests[-1].replay()
        assert replay.same, (options, replay.df)
        assert replay.changed == {}


def test_scores_equal_the_log_probabilities_of_the_answer(lab: lmx_lab.Lab) -> None:
    # Only letters, because llama.cpp reports no log-probability of a token that ends within a character.
    reply = lab.chat(
        "hello", max_tokens=6, temperature=0, logprobs=3, response_format={"type": "regex", "regex": "[a-z ]{40}"}
    )
    assert reply.logprobs is not None
    answered, scored = (
        reply.lens(),
        lab._access.run(lambda backend: backend.score([*reply.prompt_ids, *reply.ids], model=None, top=3))[
            len(reply.prompt_ids) :
        ],
    )
    assert [token.token for token in scored] == list(reply.ids)
    assert [token.logprob for token in scored] == pytest.approx([token.logprob for token in answered], abs=1e-4)
    for one, other in zip(scored, answered, strict=True):
        assert [token.token for token in one.top] == [token.token for token in other.top]
    reply = lab.chat("hello", max_tokens=6, temperature=0)
    if reply.ids:
        assert len(reply.lens().df) == len(reply.ids)


def test_the_model_s_files_are_hashed(lab: lmx_lab.Lab) -> None:
    lab.chat("hello", max_tokens=1)
    for _ in range(10_000):
        provenance = lab.requests[-1].record.provenance
        if provenance.weights:
            break
    assert len(provenance.weights) == len(provenance.template) == 64
