"""Test that answers continue from exact tokens: on MLX and on llama.cpp, with tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lmx_lab
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, ModelEntry

LETTERS = {"type": "regex", "regex": "[a-z ]{40}"}


@pytest.fixture(scope="module", params=["mlx", "gguf"])
def lab(
    request: pytest.FixtureRequest, tiny: ModelEntry, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lmx_lab.Lab]:
    paths: dict[Format, Path] = {"mlx": tiny.path, "gguf": tiny_gguf}
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=4, threads=1)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load(paths[request.param])
        yield lab


def test_a_branch_with_the_token_that_was_chosen_anyway_repeats_the_answer(lab: lmx_lab.Lab) -> None:
    reply = lab.chat("Say something.", max_tokens=24, temperature=0, logprobs=3)
    print(reply.ids, reply.text, [t.token for t in reply.logprobs], reply.finish_reason)
    for at in (0, 5, len(reply.ids) - 1):
        branch = reply.branch(at, reply.ids[at])
        print(at, branch, branch.ids, branch.answer.is_scored)
        assert branch.ids == reply.ids
        assert branch.text == reply.text
        assert branch.finish_reason == reply.finish_reason


def test_explore(lab: lmx_lab.Lab) -> None:
    tree = lab.explore("hello", width=2, depth=3, max_tokens=8, temperature=0)
    print(tree)
    print([b.answer.is_scored for b in tree])
    assert len(tree) == 8
