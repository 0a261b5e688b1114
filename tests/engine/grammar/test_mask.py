"""Masks over a real vocabulary, and budgets for reasoning tokens, without a model."""

import json
import unicodedata
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.grammar.compile import GrammarCompiler, read_token_table
from lmx_lab.engine.grammar.mask import Constraint, ThinkingBudget
from lmx_lab.engine.grammar.worker import build_tokenizer, compile_grammar
from lmx_lab.engine.mlx.sampling import ConstrainedSampler
from lmx_lab.errors import InvalidRequestError
from tests.engine.grammar.grammars import PERSON, WIDTH, grammar_for, schema
from tests.support.engines import matchers_of


def test_a_grammar_that_becomes_too_complex_fails_with_a_reason(tokenizer):
    words = read_token_table(tokenizer, width=WIDTH, markers=set())
    ambiguous = AnswerFormat(kind="lark", text='start: s\ns: s s | s s s | /[a-z]+/ | " "')
    matcher = compile_grammar(build_tokenizer(words), grammar_for(ambiguous))
    constraint = Constraint(matcher, None)
    drawn = np.random.default_rng(0)
    for _ in range(300):
        mask = constraint.mask(WIDTH)
        if mask is None:
            break
        constraint.advance(int(drawn.choice(np.flatnonzero(mask))))
    assert isinstance(constraint.failure, InvalidRequestError)
    assert "<state>" not in constraint.failure.message
    assert constraint.mask(WIDTH) is None


@pytest.mark.parametrize("text", ["x <|im_end|> y", "<|endoftext|>", "a" * 3000])
def test_a_constant_may_be_long_or_spell_a_special_token(compiler, table, text):
    (matcher,) = matchers_of(compiler, grammar_for(schema({"const": text})))
    constraint, said = Constraint(matcher, None), b""
    while not constraint.complete and constraint.failure is None:
        mask = constraint.mask(WIDTH)
        token = int(np.flatnonzero(mask)[-1])
        said += table.tokens[token]
        constraint.advance(token)
    assert json.loads(said) == text


def test_what_the_grammar_determines_is_written_in_the_tokens_of_the_tokenizer(compiler, tokenizer):
    keys = {"setup": {"const": "conditions"}, "publication_year": {"type": "null"}}
    one_value = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
    (matcher,) = matchers_of(compiler, grammar_for(schema(one_value)))
    constraint, tokens = Constraint(matcher, None), []
    while not constraint.complete:
        tokens.append(int(np.flatnonzero(constraint.mask(WIDTH))[-1]))
        constraint.advance(tokens[-1])
    written = [tokenizer.decode([token]) for token in tokens]
    for word in ("setup", "conditions", "publication", "year"):
        assert word in written
    assert json.loads(tokenizer.decode(tokens)) == {"setup": "conditions", "publication_year": None}


def test_text_that_the_tokenizer_would_change_is_forced_byte_by_byte(table):
    normalizing = replace(table, encode=lambda text: table.encode(unicodedata.normalize("NFC", text)))
    matcher = compile_grammar(build_tokenizer(normalizing), grammar_for(schema({"const": "cafe\u0301!"})))
    constraint, written = Constraint(matcher, None), b""
    while not constraint.complete and constraint.failure is None:
        token = int(np.flatnonzero(constraint.mask(WIDTH))[-1])
        written += table.tokens[token]
        constraint.advance(token)
    assert json.loads(written) == "cafe\u0301!"


def test_a_token_outside_the_grammar_is_a_failure(compiler, tokenizer):
    (matcher,) = matchers_of(compiler, grammar_for(schema(PERSON)))
    constraint = Constraint(matcher, None)
    constraint.advance(tokenizer.encode("no")[0])
    assert isinstance(constraint.failure, InvalidRequestError)
    assert constraint.mask(WIDTH) is None


def test_matchers_of_one_grammar_advance_independently(compiler, tokenizer):
    first, second = (
        Constraint(matcher, None) for matcher in matchers_of(compiler, grammar_for(schema(PERSON)), count=2)
    )
    first.advance(tokenizer.encode("{")[0])
    assert (second.mask(WIDTH) != first.mask(WIDTH)).any()


def test_ids_without_a_token_are_never_allowed(tokenizer, pool):
    wide = GrammarCompiler(lambda: read_token_table(tokenizer, width=WIDTH + 100, markers=set()), pool=pool)
    (matcher,) = matchers_of(wide, grammar_for(AnswerFormat(kind="regex", text="(?s:.*)")))
    mask = Constraint(matcher, None).mask(WIDTH + 100)
    assert mask[:WIDTH].sum() > WIDTH // 2
    assert not mask[WIDTH:].any()
    # Special tokens have no text. The one that ends the answer is allowed.
    assert not mask[3]
    assert mask[2]


@pytest.mark.parametrize("normalize", [False, True])
def test_the_sampler_draws_the_most_likely_allowed_token(compiler, tokenizer, normalize):
    (matcher,) = matchers_of(compiler, grammar_for(AnswerFormat(kind="regex", text="(yes|no)")))
    logits = mx.random.normal((1, WIDTH), key=mx.random.key(3))
    seen = []

    def most_likely(logprobs):
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    sampler = ConstrainedSampler(Constraint(matcher, None), most_likely, normalize=normalize)
    text = ""
    while text not in ("yes", "no"):
        token = int(sampler(logits).item())
        text += tokenizer.decode([token])
        assert "yes".startswith(text) or "no".startswith(text)
    total = float(mx.exp(seen[0]).sum())
    assert (abs(total - 1) < 1e-3) is normalize


# Budgets for reasoning tokens

START, END = 3, 4
NAMES = {START: b"<think>", END: b"</think>", 10: b"hm ", 11: b"\xc3", 12: b"\xa9", 13: b"</thi", 14: b"nk>"}


def forced(allowed, *tokens, open, end=(END,)):
    """Return the forced token before each token, and after the last one."""
    budget = ThinkingBudget(
        allowed, markers=("<think>", "</think>"), end=end, open=open, bytes_of=lambda id_: NAMES[id_]
    )
    seen = [budget.forced]
    for token in tokens:
        budget.advance(token)
        seen.append(budget.forced)
    return seen


@pytest.mark.parametrize(
    ("allowed", "is_open", "tokens", "expected"),
    [
        # Reasoning is ended when the budget is used up, immediately if it is 0.
        (2, True, (10, 10, END, 10, 10), [None, None, END, None, None, None]),
        (0, True, (END, 10), [END, None, None]),
        (0, False, (START, END, 10), [None, END, None, None]),
        # An answer without reasoning is not limited, and a start marker within an answer does not begin reasoning.
        (1, False, (10, 10, 10), [None] * 4),
        (0, False, (10, START, 10), [None] * 4),
        # Reasoning that has ended is not ended again.
        (2, True, (10, END, 10, 10, 10), [None] * 6),
        (3, True, (10, 13, 14, 10, 10, 10), [None] * 7),
        # The budget waits for the end of a character.
        (1, True, (11, 12, END), [None, None, END, None]),
    ],
)
def test_reasoning_is_ended_within_its_budget(allowed, is_open, tokens, expected):
    assert forced(allowed, *tokens, open=is_open) == expected


def test_all_tokens_of_an_end_marker_are_forced():
    assert forced(1, 10, 13, 14, 10, open=True, end=(13, 14)) == [None, 13, 14, None, None]
