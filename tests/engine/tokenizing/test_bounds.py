"""The steps of a tokenizer show whether its time is bounded."""

import pytest
from tokenizers import Tokenizer, models

from lmx_lab.engine.tokenizing.encoder import find_unbounded_part, find_unbounded_step


@pytest.mark.parametrize(
    ("step", "part"),
    [
        ({"type": "Replace", "pattern": {"Regex": "(a|a|aa|b)*c"}, "content": ""}, "regular expression"),
        ({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}, "regular expression"),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}, "times as long"),
        ({"type": "Unheard-of"}, "of the type Unheard-of"),
    ],
)
def test_a_step_without_a_bound_is_named(step, part):
    assert part in (find_unbounded_step([{"type": "NFC"}, step]) or "")


def test_many_small_replacements_have_no_bound():
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    assert find_unbounded_step([step] * 5) is None
    assert find_unbounded_step([step] * 10) is not None


def test_the_tokenizers_of_the_starter_models_are_bounded(smollm2, minilm):
    for entry in (smollm2, minilm):
        assert find_unbounded_part(Tokenizer.from_file(str(entry.path / "tokenizer.json"))) is None


def test_a_word_piece_model_with_endless_words_is_not_bounded():
    model = models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)
    assert find_unbounded_part(Tokenizer(model)) is not None
