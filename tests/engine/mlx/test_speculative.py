"""Prompt lookup and draft models save passes, and never change an answer."""

import asyncio
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from lmx_lab.engine import AnswerFormat, ModelManager, Sampling, TextPrompt, TokenPrompt
from lmx_lab.engine.mlx.speculative import (
    FIRST_PAUSE,
    LONGEST_DRAFT,
    NGRAM,
    DraftModel,
    PromptLookup,
    SpeculativeBatch,
)
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.values.outputs import GenerationReport, TokenLogprob
from lmx_lab.weights.catalog import Catalog
from tests.support.asking import invalid
from tests.support.engines import finish_with_logprobs, load_entry, manager_with, request, run
from tests.support.models import teach_thinking

PAST = [*range(10, 40), 90, 91, 10, 11, 12]


def test_the_tokens_after_the_last_occurrence_are_drafted():
    lookup = PromptLookup()
    # The first token is the one that has been sampled but not computed.
    expected = lookup.first_draft + 1
    assert list(lookup.expect(PAST, limit=100)) == [*range(13, 13 + expected)]
    assert list(lookup.expect([*PAST, 50, 10, 11, 12], limit=100)) == ([50, 10, 11, 12] * expected)[:expected]
    assert list(lookup.expect([*PAST, 50, 10, 11, 12, 7, 7, 7, 7], limit=100)) == [7] * expected


def test_a_predicted_text_is_expected_before_the_text_itself_until_it_ends():
    lookup = PromptLookup([1, *PAST[-NGRAM:], 90, 91])
    assert lookup.expect(PAST, limit=100) == [90, 91]
    assert lookup.expect(PAST, limit=1) == [90]
    assert lookup.expect([*PAST, 50, 11, 12, 13], limit=5) == [14, 15, 16, 17, 18]
    assert list(PromptLookup().expect(PAST, limit=3)) == [13, 14, 15]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 2, 3], list(range(100))])
def test_nothing_is_drafted_without_an_earlier_occurrence(tokens):
    assert list(PromptLookup().expect(tokens, limit=100)) == []


def test_accepted_drafts_become_longer_and_rejected_ones_shorter():
    lookup, lengths = PromptLookup(), []
    for accepted in (1, 1, 1, 1, 0):
        draft = len(lookup.expect(PAST, limit=100)) - 1
        lengths.append(draft)
        lookup.record(at=len(PAST), drafted=draft, accepted=accepted * draft, cost=1.5)
    assert lengths == [lookup.first_draft, *[LONGEST_DRAFT] * 4]
    assert len(lookup.expect(PAST, limit=100)) - 1 == lookup.first_draft
    assert lookup.accepted < lookup.drafted == sum(lengths)


def test_drafts_pause_while_they_save_no_time():
    lookup, passes = PromptLookup(), 0
    while lookup.expect(PAST, limit=100):
        lookup.record(at=len(PAST), drafted=4, accepted=0, cost=1.8)
        passes += 1
    assert passes <= 5
    longer = [*PAST, *range(200, 200 + FIRST_PAUSE - 3), 10, 11, 12]
    assert lookup.expect(longer, limit=100)
    # One more failure makes the pause longer.
    lookup.record(at=len(longer), drafted=4, accepted=0, cost=1.8)
    assert not lookup.expect([*longer, *range(300, 300 + FIRST_PAUSE), 10, 11, 12], limit=100)
    assert lookup.expect([*longer, *range(300, 300 + 2 * FIRST_PAUSE), 10, 11, 12], limit=100)


@pytest.fixture
def drafts_always_pay(monkeypatch):
    """Use drafts wherever possible, independently of measured durations."""
    monkeypatch.setattr(SpeculativeBatch, "cost", 1.0)


REPEATED = TokenPrompt(tokens=(*range(1000, 1040), *range(1000, 1040), *range(1000, 1004)))
LONG = {"prompt": REPEATED, "max_tokens": 60}
REQUESTS = {
    "greedy": LONG,
    "seeded": {**LONG, "sampling": Sampling(temperature=0.3, seed=3)},
    "seeded, filtered": {**LONG, "sampling": Sampling(temperature=0.5, seed=4, top_p=0.9, top_k=20)},
    "penalties": {**LONG, "sampling": Sampling(temperature=0, frequency_penalty=0.01, presence_penalty=0.01)},
    "bias": {**LONG, "sampling": Sampling(temperature=0, logit_bias=((1010, 1.0),))},
    "no end": {**LONG, "ignore_eos": True},
    "one token": {**LONG, "max_tokens": 1},
    "two tokens": {**LONG, "max_tokens": 2},
    "a format": {**LONG, "answer_format": AnswerFormat(kind="regex", text="[a-z ]{200,}")},
    "a format that ends": {**LONG, "answer_format": AnswerFormat(kind="regex", text="(north, south; ){6}")},
    "a seeded format": {
        **LONG,
        "answer_format": AnswerFormat(kind="regex", text=r"(north, [a-z]{3}; ){6}\."),
        "sampling": Sampling(temperature=0.5, seed=5, top_p=0.9),
    },
}


@pytest.fixture(scope="module")
def repetitive(tiny, tmp_path_factory):
    """``tiny`` with larger embeddings of a few tokens, so that its answers consist of these tokens and repeat."""
    home = tmp_path_factory.mktemp("repetitive-home")
    folder = shutil.copytree(tiny.path, home / "models" / "repetitive")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][1000:1012] *= 10
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return Catalog(Settings(home=home)).resolve("repetitive")


@dataclass(frozen=True)
class Answers:
    """The answers to ``REQUESTS`` and a few more, of one load."""

    alone: dict[str, tuple[str, GenerationReport]]
    logprobs: tuple[str, list[TokenLogprob]]
    others: list[str]
    """Texts of simultaneous answers, and of one after a cached prefix that a draft has written."""


async def answers(entry, **options):
    async with ModelManager(Settings(slots=4)) as manager:
        report = await load_entry(manager, entry, LoadSpec(model=entry.id, **options))
        alone = {name: await run(manager, **changes) for name, changes in REQUESTS.items()}
        text = alone["no end"][0]
        alone["stop"] = await run(manager, **LONG, stop=(text[len(text) // 2 :][:6],))
        logprobs = await finish_with_logprobs(await manager.submit(request(**LONG, top_logprobs=3)))
        together = await asyncio.gather(*(run(manager, **LONG) for _ in range(3)))
        again = await run(manager, **{**LONG, "max_tokens": 40})
        totals = manager.snapshot.totals
    reports = [report for _, report in alone.values()]
    accepted, drafted = (sum(getattr(it, f"{name}_tokens") for it in reports) for name in ("accepted", "drafted"))
    assert totals.accepted_tokens >= accepted
    assert totals.drafted_tokens >= drafted >= accepted
    assert alone["one token"][1].drafted_tokens == 0
    draft = options.get("draft")
    assert report.draft == draft
    assert ("is not smaller than repetitive" in report.warning) == (draft is not None)
    return Answers(alone, logprobs, [text for text, _ in (*together, again)])


@pytest.mark.anyio
@pytest.mark.usefixtures("no_shared_model", "drafts_always_pay")
async def test_a_prediction_saves_passes_and_does_not_change_the_answer(tiny):
    async with manager_with(tiny) as manager:
        greedy = {"sampling": Sampling(temperature=0), "max_tokens": 60, "ignore_eos": True}
        text, plain = await run(manager, prompt=TextPrompt(text="The sea"), **greedy)
        predicted, report = await run(manager, prompt=TextPrompt(text="The sea"), prediction=text, **greedy)
        other, _ = await run(manager, prompt=TextPrompt(text="The sea"), prediction="Bread " * 100_000, **greedy)
    assert predicted == other == text
    assert report.accepted_tokens > plain.accepted_tokens


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.usefixtures("no_shared_model", "drafts_always_pay")
async def test_answers_are_the_same_with_and_without_drafts(repetitive, tiny):
    plain = await answers(repetitive, prompt_lookup=False)
    assert plain.alone["greedy"][1].drafted_tokens == 0
    lookup = await answers(repetitive)
    own = await answers(repetitive, draft=str(repetitive.path))
    other = await answers(repetitive, draft=str(tiny.path))
    for name in ("greedy", "a format that ends"):
        assert lookup.alone[name][1].accepted_tokens > 0
    by_model = own.alone["greedy"][1]
    assert 30 < by_model.accepted_tokens <= by_model.drafted_tokens
    rejected = other.alone["greedy"][1]
    assert rejected.accepted_tokens < rejected.drafted_tokens / 2
    for used in (lookup, own, other):
        for name, (text, report) in used.alone.items():
            expected, reference = plain.alone[name]
            assert text == expected, name
            assert (report.output_tokens, report.finish_reason) == (reference.output_tokens, reference.finish_reason)
        assert used.others == plain.others
        assert used.logprobs[0] == plain.logprobs[0]
        for found, token in zip(used.logprobs[1], plain.logprobs[1], strict=True):
            assert found.token == token.token
            assert found.logprob == pytest.approx(token.logprob, abs=1e-4)
            assert [top.token for top in found.top] == [top.token for top in token.top]


@pytest.mark.anyio
@pytest.mark.usefixtures("no_shared_model")
async def test_a_draft_model_that_cannot_be_used_is_refused(tiny, tmp_path):
    folder = shutil.copytree(tiny.path, tmp_path / "other")
    teach_thinking(folder)
    async with manager_with(tiny) as manager:
        other = "other has a vocabulary of 49,152 tokens and tiny one of 49,152; different tokens: 4"
        for draft, reason in (
            (str(folder), other),
            ("no-model", "the draft model cannot be used: there is no model 'no-model'"),
        ):
            with invalid("draft", reason, LabError):
                await load_entry(manager, tiny, LoadSpec(model=tiny.id, draft=draft))
        assert manager.snapshot.state == "ready"


def test_a_draft_model_computes_a_long_text_in_parts_and_only_what_is_new(tiny):
    model, _ = load_model(tiny.path)
    drafter, text = (
        DraftModel(model, tokens=49152),
        [int(it) for it in np.random.default_rng(0).integers(5, 40_000, 600)],
    )
    assert drafter.continue_text(text, 4) == drafter.continue_text(text, 4) == []
    long = drafter.continue_text(text, 4)
    assert len(long) == 4
    assert drafter.continue_text([*text, *long[:2]], 2) == long[2:]
    other = [*text[:100], *text[300:400]]
    assert drafter.continue_text(other, 3) == DraftModel(model, tokens=49152).continue_text(other, 3)
    # Tokens that the draft model does not know.
    assert max(DraftModel(model, tokens=100).continue_text([7, 40_000], 3)) < 100
