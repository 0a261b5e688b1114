"""Prompt lookup computes several tokens in one pass, which never changes an answer."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from lmx_lab.engine import AnswerFormat, ModelManager, Sampling, TokenPrompt
from lmx_lab.engine.mlx.prompt_lookup import FIRST_DRAFT, FIRST_PAUSE, LONGEST_DRAFT, LookupBatch, PromptLookup
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.weights import Catalog
from tests.engine.conftest import finish_with_logprobs, request, run

PAST = [*range(10, 40), 90, 91, 10, 11, 12]


def test_the_tokens_after_the_last_occurrence_are_drafted() -> None:
    lookup = PromptLookup()
    # The first token is the one that has been sampled but not computed.
    assert list(lookup.draft(PAST, limit=100)) == [13, 14, 15, 16, 17]
    assert list(lookup.draft([*PAST, 50, 10, 11, 12], limit=100)) == [50, 10, 11, 12, 50]
    assert list(lookup.draft([*PAST, 50, 10, 11, 12, 7, 7, 7, 7], limit=100)) == [7] * 5
    assert list(PromptLookup().draft(PAST, limit=3)) == [13, 14, 15]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 2, 3], list(range(100))])
def test_nothing_is_drafted_without_an_earlier_occurrence(tokens: list[int]) -> None:
    assert list(PromptLookup().draft(tokens, limit=100)) == []


def test_accepted_drafts_become_longer_and_rejected_ones_shorter() -> None:
    lookup, lengths = PromptLookup(), []
    for accepted in (1, 1, 1, 1, 0):
        draft = len(lookup.draft(PAST, limit=100)) - 1
        lengths.append(draft)
        lookup.record(at=len(PAST), drafted=draft, accepted=accepted * draft, cost=1.5)
    assert lengths == [FIRST_DRAFT, 2 * FIRST_DRAFT, LONGEST_DRAFT, LONGEST_DRAFT, LONGEST_DRAFT]
    assert len(lookup.draft(PAST, limit=100)) - 1 == LONGEST_DRAFT // 2
    assert lookup.accepted < lookup.drafted == sum(lengths)


def test_drafts_pause_while_they_do_not_pay() -> None:
    lookup, passes = PromptLookup(), 0
    while lookup.draft(PAST, limit=100):
        lookup.record(at=len(PAST), drafted=4, accepted=0, cost=1.8)
        passes += 1
    assert passes <= 3
    longer = [*PAST, *range(200, 200 + FIRST_PAUSE - 3), 10, 11, 12]
    assert lookup.draft(longer, limit=100)
    # One more failure makes the pause longer.
    lookup.record(at=len(longer), drafted=4, accepted=0, cost=1.8)
    assert not lookup.draft([*longer, *range(300, 300 + FIRST_PAUSE), 10, 11, 12], limit=100)
    assert lookup.draft([*longer, *range(300, 300 + 2 * FIRST_PAUSE), 10, 11, 12], limit=100)


@pytest.fixture
def drafts_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use drafts wherever possible, independently of measured durations."""
    monkeypatch.setattr(LookupBatch, "_cost", 1.0)


REPEATED = TokenPrompt(tokens=(*range(1000, 1040), *range(1000, 1040), *range(1000, 1004)))
LONG: dict[str, Any] = {"prompt": REPEATED, "max_tokens": 60}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "seeded": {**LONG, "sampling": Sampling(temperature=0.3, seed=3)},
    "seeded, filtered": {**LONG, "sampling": Sampling(temperature=0.5, seed=4, top_p=0.9, top_k=20)},
    "penalties": {**LONG, "sampling": Sampling(temperature=0, frequency_penalty=0.01, presence_penalty=0.01)},
    "bias": {**LONG, "sampling": Sampling(temperature=0, logit_bias=((1010, 1.0),))},
    "no end": {**LONG, "ignore_eos": True},
    "one token": {**LONG, "max_tokens": 1},
    "two tokens": {**LONG, "max_tokens": 2},
    "a format": {**LONG, "answer_format": AnswerFormat(kind="regex", text="[a-z ]{200,}")},
}


@pytest.fixture(scope="module")
def repetitive(tiny: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> ModelEntry:
    """``tiny`` with larger embeddings of a few tokens, so that its answers consist of these tokens and repeat."""
    home = tmp_path_factory.mktemp("repetitive-home")
    folder = shutil.copytree(tiny.path, home / "models" / "repetitive")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][1000:1012] *= 10
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return Catalog(Settings(home=home)).resolve("repetitive")


@pytest.mark.anyio
@pytest.mark.usefixtures("no_shared_model", "drafts_always_pay")
async def test_answers_are_the_same_with_and_without_drafts(repetitive: ModelEntry) -> None:
    answers = []
    for prompt_lookup in (None, False):
        async with ModelManager(Settings(slots=4)) as manager:
            await manager.load_entry(repetitive, LoadSpec(model=repetitive.id, prompt_lookup=prompt_lookup))
            found = {name: await run(manager, **changes) for name, changes in REQUESTS.items()}
            text = found["no end"][0]
            found["stop"] = await run(manager, **LONG, stop=(text[len(text) // 2 :][:6],))
            logprobs = await finish_with_logprobs(await manager.submit(request(**LONG, top_logprobs=3)))
            together = await asyncio.gather(*(run(manager, **LONG) for _ in range(3)))
            # A cached prefix that a draft has written.
            again = await run(manager, **{**LONG, "max_tokens": 40})
            totals = manager.snapshot
        answers.append((found, logprobs, together, again))
        reports = [report for _, report in found.values()]
        accepted, drafted = (sum(getattr(it, f"{name}_tokens") for it in reports) for name in ("accepted", "drafted"))
        assert (totals.accepted_tokens > 0) == (accepted > 0) == (prompt_lookup is None)
        assert drafted >= accepted
        assert totals.drafted_tokens >= drafted
        assert found["greedy"][1].accepted_tokens > 0 or prompt_lookup is False
        assert found["a format"][1].drafted_tokens == found["one token"][1].drafted_tokens == 0
    (used, used_logprobs, *used_rest), (plain, plain_logprobs, *plain_rest) = answers
    for name, (text, report) in used.items():
        expected, reference = plain[name]
        assert text == expected, name
        assert (report.output_tokens, report.finish_reason) == (reference.output_tokens, reference.finish_reason), name
    assert [text for text, _ in (*used_rest[0], used_rest[1])] == [text for text, _ in (*plain_rest[0], plain_rest[1])]
    assert used_logprobs[0] == plain_logprobs[0]
    for found, reference_token in zip(used_logprobs[1], plain_logprobs[1], strict=True):
        assert found.token == reference_token.token
        assert found.logprob == pytest.approx(reference_token.logprob, abs=1e-4)
        assert [top.token for top in found.top] == [top.token for top in reference_token.top]
