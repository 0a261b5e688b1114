"""Options of a load are checked before the load begins."""

from dataclasses import replace

import pytest

from lmx_lab.engine.validation import MAX_PADDING_TOKENS, check_options, check_vocabularies
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ECHO, LoadSpec
from tests.support.asking import invalid

TARGET, DRAFT = replace(ECHO, id="target"), replace(ECHO, id="draft")
TOKENS = [str(number) for number in range(2000)]


@pytest.mark.parametrize("padding", [0, 1, MAX_PADDING_TOKENS])
def test_vocabularies_may_differ_by_padding(padding):
    longer = [*TOKENS, *(f"<pad {number}>" for number in range(padding))]
    check_vocabularies(TARGET, DRAFT, TOKENS, longer)
    check_vocabularies(TARGET, DRAFT, longer, TOKENS)


@pytest.mark.parametrize(
    ("drafted", "sizes"),
    [
        (TOKENS[:1000], "has a vocabulary of 1,000 tokens and target one of 2,000; choose a smaller model with"),
        (TOKENS[::-1], "has a vocabulary of 2,000 tokens and target one of 2,000; different tokens: 2,000"),
        ([*TOKENS[:9], "x", *TOKENS[10:]], "one of 2,000; different tokens: 1"),
    ],
)
def test_a_draft_model_with_another_vocabulary_is_refused_with_both_sizes(drafted, sizes):
    with invalid("draft", sizes, UnusableModelError):
        check_vocabularies(TARGET, DRAFT, TOKENS, drafted)


def test_a_draft_model_must_be_a_chat_model_and_replaces_prompt_lookup():
    spec = LoadSpec(model="target", draft="draft")
    check_options(replace(TARGET, draft=DRAFT), spec)
    with pytest.raises(UnusableModelError, match="draft is an embedding model; a draft model must be a chat model"):
        check_options(replace(TARGET, draft=replace(DRAFT, kind="embedding")), spec)
    with pytest.raises(UnusableModelError, match="both draft and prompt_lookup are given"):
        check_options(TARGET, replace(spec, prompt_lookup=True))
