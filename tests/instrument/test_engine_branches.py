"""Test that answers continue from exact tokens, and the figures of the lens: on MLX and on llama.cpp."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import lmx_lab
from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.panels.lens import LensPanel
from lmx_lab.panels.workbench import Workbench
from lmx_lab.settings import Settings
from tests.support.panels import Reader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["mlx", "gguf"])
def lab(request, tiny, tiny_gguf, tmp_path_factory):
    paths = {"mlx": tiny.path, "gguf": tiny_gguf}
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=8, threads=1)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load(paths[request.param])
        yield lab


def is_mlx(lab):
    return lab.requests[-1].record.provenance.format == "mlx"


def test_a_branch_with_the_same_token_repeats_the_answer(lab):
    for options in ({}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"300": 2.0}}):
        reply = lab.chat("Say something.", max_tokens=24, temperature=0, logprobs=3, ignore_eos=True, **options)
        for at in (0, 5, len(reply.ids) - 1):
            branch = reply.branch(at, reply.ids[at])
            assert (branch.ids, branch.text, branch.finish_reason) == (reply.ids, reply.text, reply.finish_reason)
            assert branch.answer.is_scored
            assert branch.logprob == pytest.approx(reply.lens().logprob, abs=1e-3)
        record = lab.requests[-1].record
        assert (record.answer, record.prompt) == (reply.ids, reply.prompt_ids)
        assert lab.requests[-1].replay().same


def test_a_branch_uses_cached_tokens_and_a_seed_of_its_own(lab):
    # A seed, because the ids of tokens that end within a character may not be known on llama.cpp.
    reply = lab.chat("Say something.", max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    one, other = (reply.branch(20, " London", seed=7) for _ in range(2))
    assert one.ids == other.ids
    assert one.ids[:20] == reply.ids[:20]
    assert one.lens()[20].text == " London"
    timings = lab.requests[-1].record.timings
    assert timings["cached_tokens"] >= len(reply.prompt_ids) + 16
    assert timings["output_tokens"] == 40 - 21
    assert reply.branch(20, " London").ids != one.ids


def test_the_beginnings_of_an_answer_are_expanded(lab):
    tree = lab.explore("hello", width=2, depth=3, max_tokens=8, temperature=0, ignore_eos=True)
    assert [branch.name for branch in tree] == [
        *("1-1-1", "1-1-2", "1-2-1", "1-2-2", "2-1-1", "2-1-2", "2-2-1", "2-2-2"),
    ]
    greedy = lab.chat("hello", max_tokens=8, temperature=0, ignore_eos=True)
    assert tree.root.ids == greedy.ids
    assert len({branch.ids[:3] for branch in tree}) == 8
    # One of them, because llama.cpp takes seconds to score the special tokens of a prompt.
    branch = tree["2-2-2"]
    tokens = [*greedy.prompt_ids, *branch.ids]
    scored = lab._portal.run(lab._backend.score(tokens, model=None, top=1))
    assert branch.logprob == pytest.approx(sum(token.logprob or 0 for token in scored[-8:]), abs=1e-3)


def test_entropies_and_ranks_equal_those_of_the_whole_distribution(lab, tiny):
    reply = lab.chat("hello", max_tokens=6, temperature=0, ignore_eos=True)
    lens = reply.lens(color="entropy")
    root = reply.tree().root
    # Scores that were computed without entropies are not reused for them.
    assert [token.token for token in root.lens()] == [token.token for token in root.lens(color="entropy")]
    assert all(token.entropy is not None for token in root.lens(color="entropy"))
    model, _ = mlx_lm.load(str(tiny.path))[:2]
    logits = np.array(model(mx.array([[*reply.prompt_ids, *reply.ids]]))[0].astype(mx.float32), dtype=np.float64)
    rows = logits[len(reply.prompt_ids) - 1 : -1]
    logprobs = rows - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    logprobs -= rows.max(axis=1, keepdims=True)
    for token, row in zip(lens, logprobs, strict=True):
        assert token.logprob == pytest.approx(row[token.token], abs=1e-2 if not is_mlx(lab) else 1e-4)
        assert token.entropy == pytest.approx(-(np.exp(row) * row).sum(), abs=1e-3 if is_mlx(lab) else 1e-2)
        assert token.rank == 1


def test_the_lens_panel_computes_entropies_on_request(lab):
    lab.chat("hello", max_tokens=3, temperature=0, ignore_eos=True)
    workbench = Workbench(LocalBackend(lab.server))
    reader = Reader(LensPanel(workbench), workbench)
    try:
        reader.until(lambda panel: panel.answer.get("scored") and not panel.busy)
        assert has_entropies(reader.panel) == is_mlx(lab)
        reader.ask("score", distributions=True)
        reader.until(lambda panel: has_entropies(panel) and not panel.busy)
    finally:
        workbench.suspend()


def has_entropies(panel):
    return all(entropy is not None for _, _, _, entropy, *_ in panel.answer["tokens"])


def test_an_enforced_format_is_continued_on_mlx_and_refused_on_llama_cpp(lab):
    reply = lab.chat("hello", temperature=0, max_tokens=30, response_format={"type": "regex", "regex": "[a-z ]{12}"})
    if not is_mlx(lab):
        with pytest.raises(InvalidRequestError, match="cannot continue this answer"):
            reply.branch(0, reply.ids[0])
        return
    assert reply.branch(1, reply.ids[1]).text == reply.text
    changed = reply.branch(1, "zz")
    assert len(changed.text) == 12
    assert "zz" in changed.text
    with pytest.raises(InvalidRequestError, match="the format of the answer does not allow the token"):
        reply.branch(1, "7")
