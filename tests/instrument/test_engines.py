"""Test records, repetition and scoring with models: on MLX and on llama.cpp."""

import pytest

import lmx_lab
from lmx_lab.settings import Settings

pytestmark = pytest.mark.slow
TEXT = "<|im_start|>user\nHi \N{GRINNING FACE} 你好<|im_end|>\n<|im_start|>assistant\nThe sea is wide."
"""Text with special tokens, one of which ends answers, and with characters of several tokens."""


@pytest.fixture(scope="module", params=["mlx", "gguf"])
def lab(request, tiny, tiny_gguf, tmp_path_factory):
    paths = {"mlx": tiny.path, "gguf": tiny_gguf}
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, slots=2, threads=1)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        lab.load(paths[request.param])
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


def test_the_model_s_files_are_hashed(lab):
    lab.chat("hello", max_tokens=1)
    for _ in range(10_000):
        provenance = lab.requests[-1].record.provenance
        if provenance.weights:
            break
    assert len(provenance.weights) == len(provenance.template) == 64


def test_the_steps_of_a_request_add_up_to_its_report(lab):
    streams = [lab.chat("word " * 40, stream=True, max_tokens=8, ignore_eos=True) for _ in range(3)]
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
    for max_tokens in (40, 2):
        options = (
            {"response_format": {"type": "regex", "regex": text}} if max_tokens == 40 else {"logit_bias": {10813: 50}}
        )
        reply = lab.chat("hello", max_tokens=max_tokens, temperature=0, **options)
        assert len(reply.ids) == reply.usage.completion_tokens
        assert lab.requests[-1].replay().same
