"""The worker of the grammar sandbox names the part that cannot be enforced. It is called in this process."""

import json
import pickle
import random

import pytest

from lmx_lab.engine.echo.model import echo_vocabulary
from lmx_lab.engine.grammar import worker
from lmx_lab.engine.requests import AnswerFormat
from tests.engine.grammar.grammars import PERSON, grammar_for, schema

PLAIN = grammar_for(schema(PERSON))
EMPTY = grammar_for(AnswerFormat(kind="regex", text="a[^\\s\\S]"))


def ask(message):
    return json.loads(worker.handle(pickle.dumps(message)))


@pytest.fixture(autouse=True)
def _table():
    table = echo_vocabulary().token_table
    assert worker.handle(pickle.dumps((table.tokens, table.special_token_ids, table.eos_tokens))) == b""


def test_a_grammar_that_can_be_enforced_has_no_problem():
    answer = ask([PLAIN])
    assert (answer["reason"], answer["part"]) == ("", None)
    assert answer["used_s"] >= answer["compile_s"] >= 0


def test_the_part_that_causes_a_problem_is_named():
    answer = ask([EMPTY, PLAIN, EMPTY])
    assert answer["reason"]
    assert answer["part"] == 1


def test_a_grammar_whose_tokens_take_too_long_is_refused():
    matcher = worker.compile_grammar(worker.build_tokenizer(echo_vocabulary().token_table), PLAIN)
    assert worker.walk(matcher.deep_copy(), random.Random(0)) == ""
    assert "ms to check; simplify it" in worker.walk(matcher, random.Random(0), slowest_s=-1.0)
