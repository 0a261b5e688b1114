"""Test how the ids of tokens that llama.cpp did not report are found."""

from lmx_lab.engine.llama_cpp.answer import Gap, TokenIndex, choose

TOKENS = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"\xf0", b"\x9f\x98", b"\x98\x80"]
FACE = "\N{GRINNING FACE}"


def gap(text, count, *last):
    return Gap(at=0, count=count, text=text, last=last)


def test_the_missing_tokens_are_those_with_the_bytes_of_the_text():
    index = TokenIndex(TOKENS)
    only = gap(f"a{FACE}", 2, 6)
    assert choose(index.candidates(only), only, []) == (0, 1)
    either = gap(FACE, 2, 3)
    assert index.candidates(either) == [(4, 5), (1, 2)]
    assert choose(index.candidates(either), either, [7, 1, 2, 3]) == (1, 2)
    # Neither is what the tokenizer would use.
    assert choose(index.candidates(either), either, [1, 6]) is None
    for none in (gap(FACE, 3, 3), gap("", 1, 3), gap("b", 1, 0)):
        assert choose(index.candidates(none), none, []) is None
