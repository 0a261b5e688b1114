"""The steps of a tokenizer show whether its time is bounded, and its vocabulary how many tokens a text has at least."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from lmx_lab.engine.text.vocabulary import BYTES
from lmx_lab.engine.tokenizing.encoder import bound_of, find_unbounded_part, find_unbounded_step


def byte_level(*, more=(), without=""):
    tokens = [*(character for character in BYTES if character not in without), *more]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


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


@pytest.mark.parametrize(
    "text", [" " * 5000, "ab cd " * 900, "東京 🦊" * 700, "\x04" * 5000, "<|im_end|>" * 300, "!" * 5000]
)
def test_no_text_has_fewer_tokens_than_the_bound(smollm2, text):
    tokenizer = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))
    bound = bound_of(tokenizer)
    assert bound.min_tokens(text) <= len(tokenizer.encode(text).ids)


def test_bytes_that_the_vocabulary_lacks_do_not_count():
    tokenizer = byte_level(without="a")
    bound = bound_of(tokenizer)
    assert bound.min_tokens("aaab") == len(tokenizer.encode("aaab").ids) == 1


def test_composing_characters_makes_a_text_shorter_by_its_factor():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    bound = bound_of(tokenizer)
    text = "e\u0301" * 300
    assert bound.min_tokens(text) <= len(tokenizer.encode(text).ids)


def test_tokenizers_that_leave_out_text_have_no_bound(minilm):
    assert bound_of(Tokenizer.from_file(str(minilm.path / "tokenizer.json"))) is None
    stripping = byte_level()
    stripping.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert bound_of(stripping) is None
    shortening = byte_level()
    shortening.normalizer = normalizers.Replace("aa", "a")
    assert bound_of(shortening) is None
