"""Grammars in GBNF accept the same texts after their conversion; invalid ones are refused with their line."""

import pytest
from llguidance import LLMatcher

from lmx_lab.engine.echo.model import echo_vocabulary
from lmx_lab.engine.grammar.build import build_grammar
from lmx_lab.engine.grammar.worker import build_tokenizer
from lmx_lab.engine.requests import AnswerFormat
from lmx_lab.errors import InvalidRequestError

LISTS = r"""
# A list of numbers and texts, over several lines.
root  ::= "[" space (
    value ("," space value)*   # the rest
  )? "]"
value ::= number | text | root
number ::= "-"? [0-9]{1,3} ("." [0-9]+)? space
text ::= "\"" ( [^"\\\x7F\x00-\x1F] |
  "\\" ["\\nt] )* "\"" space
space ::= | " " | "\n" [ \t]{0,4}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(echo_vocabulary().token_table)


def accepts(tokenizer, grammar, text):
    built = build_grammar(AnswerFormat(kind="gbnf", text=grammar), None, None, markers={})
    matcher = LLMatcher(tokenizer, built, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(echo_vocabulary().encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (LISTS, ["[]", '[1, -2.5, "a\\n", [ "é", []]]', "[\n  7]"], ["[", "[1,]", '["a\n"]', "[1234]", "1"]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "maybe"]),
        ('root ::= word "s"\nword ::= [a-z]+', ["seas", "ss"], ["sea", "s"]),
        ('root ::= ("begin" | [a-z])+', ["bex", "begins"], ["", "B"]),
        ("root ::= [\\u00e4-\\U000000fc]{2} .? [^a]", ["äöüb", "äö\n"], ["äaa", "äöüa"]),
        ('root ::= Some-Rule+\nSome-Rule ::= "a" | "(" root ")"', ["a", "(a(aa))"], ["()", "(a"]),
        ('root ::= ("a" |) ("b" | ("c" |\n "d"))', ["ab", "c", "ad"], ["a", "aa"]),
        ("root ::= [-a] [+-] [\\]x]", ["-+]", "a-x"], ["b+x"]),
    ],
)
def test_a_grammar_accepts_its_texts_and_no_others(tokenizer, grammar, texts, others):
    assert [text for text in texts if not accepts(tokenizer, grammar, text)] == []
    assert [text for text in others if accepts(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule named 'root'"),
        ('leaf ::= "a"', "no rule named 'root'"),
        ('root ::= "a"\n\n  | leaf', "line 3: '|'"),
        ("root ::= leaf | stem", "line 1: the rule 'leaf' is not defined"),
        ('root ::= "a\nleaf', "line 1"),
        ("root ::= [z-a]", "the range z-a has no characters"),
        ('root ::= "\\q"', r"\\q is not an escape"),
        ('root ::= "\\ud800"', "d800 is not the code of a character"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "was not opened"),
        ("root ::= *", "nothing before it"),
        ("root ::= <[5]>", "is not valid GBNF"),
        ("(" * 10_000, "does not begin a rule"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_place(grammar, message):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        build_grammar(AnswerFormat(kind="gbnf", text=grammar), None, None, markers={})
    assert refused.value.param == "grammar"
