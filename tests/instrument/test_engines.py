"""Test records, repetition, scores and branches with models: on MLX and on llama.cpp."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.panels.lens import LensPanel
from tests.support.labs import serving
from tests.support.panels import Reader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["mlx", "gguf"])
def lab(request, tiny, tiny_gguf, tmp_path_factory):
    paths = {"mlx": tiny.path, "gguf": tiny_gguf}
    with serving(tmp_path_factory.mktemp("home"), paths[request.param], slots=2, threads=1) as lab:
        yield lab


def test_seeded_and_greedy_requests_repeat_exactly(lab):
    for options in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}):
        lab.chat("Say something.", max_tokens=12, ignore_eos=True, **options)
        replay = lab.requests[-1].replay()
        assert replay.same, (options, replay.df)
        assert replay.changed == {}


def test_scores_equal_the_log_probabilities_of_the_answer(lab):
    # Only letters, because llama.cpp reports no log-probability of a token that ends within a character.
    reply = lab.chat(
        "hello", max_tokens=6, temperature=0, logprobs=3, response_format={"type": "regex", "regex": "[a-z ]{40}"}
    )
    answered, tokens = reply.lens(), [*reply.prompt_ids, *reply.ids]
    scored = lab.backend.portal.run(lab.backend.score(tokens, model=None, top=3))[len(reply.prompt_ids) :]
    assert [token.token for token in scored] == list(reply.ids)
    # llama.cpp computes the tokens of a prompt with other rounding than those of an answer.
    rounding = 1e-4 if is_mlx(lab) else 0.01
    assert [token.logprob for token in scored] == pytest.approx([token.logprob for token in answered], abs=rounding)
    for one, other in zip(scored, answered, strict=True):
        assert [token.token for token in one.top] == [token.token for token in other.top]
    reply = lab.chat("hello", max_tokens=6, temperature=0)
    if reply.ids:
        assert len(reply.lens().df) == len(reply.ids)


def test_the_model_s_files_are_hashed(lab):
    lab.chat("hello", max_tokens=1)
    for _ in range(10_000):
        provenance = lab.requests[-1].record.provenance
        if provenance.weights:
            break
    assert len(provenance.weights) == len(provenance.template) == 64


def test_the_steps_of_a_request_add_up_to_its_report(lab):
    streams = [lab.chat("word " * 40, stream=True, max_tokens=60, ignore_eos=True) for _ in range(3)]
    reports = []
    for stream in streams:
        assert "".join(stream)
        reports.append(stream.reply.report)
    for one, report in zip(lab.timeline()[-3:], reports, strict=True):
        spans = one.spans()
        phases = [span.duration_s for span in spans if span.depth == 1]
        assert sum(phases) == pytest.approx(report.total_s, abs=1e-3)
        for name in ("prefill", "decode"):
            inside = [span for span in spans if span.depth == 2 and span.name == name]
            expected = report.prompt_tokens - report.cached_tokens if name == "prefill" else report.output_tokens
            assert sum(span.tokens for span in inside) == expected
        assert max(span.requests for span in spans) <= 2
        sizes = [step.kv_bytes for step in one.steps if step.kind in ("prefill", "decode")]
        assert min(sizes) > 0
        assert one.kv_bytes == max(sizes)
    assert "for a slot; meanwhile" in lab.timeline().explain()


def test_a_token_that_ends_within_a_character_has_an_id(lab):
    text = "\N{GRINNING FACE} \u9760 \u5fcc."
    for options in (
        {"max_tokens": 40, "response_format": {"type": "regex", "regex": text}},
        {"max_tokens": 2, "logit_bias": {10813: 50}},
    ):
        reply = lab.chat("hello", temperature=0, **options)
        assert len(reply.ids) == reply.usage.completion_tokens
        assert lab.requests[-1].replay().same


# Branches


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
    # A seed, because the ids of tokens that end within a character may not be known on llama.cpp. The prompt is long,
    # because shorter ones with a seed are computed there without cached tokens.
    reply = lab.chat("Say something. " * 16, max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    one, other = (reply.branch(20, " London", seed=5) for _ in range(2))
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
    for branch in tree:
        tokens = [*greedy.prompt_ids, *branch.ids]
        scored = lab.backend.portal.run(lab.backend.score(tokens, model=None, top=1))[-8:]
        # llama.cpp computes the tokens of a prompt with other rounding than those of an answer.
        rounding = 1e-3 if is_mlx(lab) else 0.1
        assert branch.logprob == pytest.approx(sum(token.logprob for token in scored), abs=rounding)


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


def test_the_lens_panel_scores_an_answer_again_if_its_log_probabilities_have_no_entropies(lab):
    lab.chat("hello", max_tokens=3, temperature=0, ignore_eos=True)
    reader = Reader(LensPanel(lab.workbench))
    reader.until(lambda panel: panel.answer.get("scored") and has_entropies(panel) and not panel.busy)
    lab.chat("hello", max_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    reader.until(lambda panel: len(panel.answer["tokens"]) == 5 and not panel.busy)
    assert has_entropies(reader.panel) == is_mlx(lab)
    reader.ask("score")
    reader.until(lambda panel: has_entropies(panel) and not panel.busy)


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
