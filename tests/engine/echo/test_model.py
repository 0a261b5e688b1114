"""The vocabulary needs no tokenizer file, encodes any text without loss, and has constant ids."""

from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.engine.echo.model import END, FIRST_BYTE, LONGEST_PIECE, EchoVocabulary

VOCABULARY = EchoVocabulary()


@given(st.text())
def test_tokens_decode_to_the_text_that_was_encoded(text):
    tokens = VOCABULARY.encode(text)
    assert VOCABULARY.decode(tokens) == text
    assert len(text.encode()) <= LONGEST_PIECE * len(tokens)


def test_words_are_split_into_pieces_of_three_letters_with_their_space():
    tokens = VOCABULARY.encode("Once upon a time, 東")
    shown = [VOCABULARY.text_of(token) for token in tokens]
    assert shown[:9] == ["O", "nce", " upo", "n", " a", " tim", "e", ",", " "]
    assert shown[9:] == ["bytes:\\xe6", "bytes:\\x9d", "bytes:\\xb1"]


def test_ids_never_change():
    assert VOCABULARY.size == 36_802
    assert VOCABULARY.encode("Once upon a time!") == [95, 9792, 33150, 126, 18524, 32290, 117, 49]


def test_special_tokens_are_shown_by_name_only():
    assert VOCABULARY.decode([END]) == ""
    assert VOCABULARY.show([END]) == "<|end|>"
    assert min(VOCABULARY.encode("<|end|>")) >= FIRST_BYTE
