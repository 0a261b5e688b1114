"""Tests that the bytes of the tokens of a text are the bytes of the text, with several kinds of tokenizers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tokenizer_utils
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmx_lab.engine.text.splitter import Detokenizer
from lmx_lab.engine.text.vocabulary import Vocabulary

pytestmark = pytest.mark.slow
# SmolLM2 has no tokens for some control characters, and for unassigned planes.
TEXTS = st.text(st.characters(exclude_categories=["C"]), max_size=30) | st.text(
    alphabet="ab \n é€😀👩‍💻漢한\t1", max_size=30
)


def encode(tokenizer, text):
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return tokenizer_utils.load(smollm2.path)


@pytest.fixture(scope="module")
def sentencepiece_like():
    """Return a tokenizer with a few words, and byte tokens for all other text, as in Llama 2 and Gemma."""
    words = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁a", "▁ab", "é"]
    pieces = {name: at for at, name in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    backend = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<tool ▁>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(text=TEXTS)
@settings(deadline=None)
def test_the_bytes_of_a_texts_tokens_are_the_text(smollm2_tokenizer, text):
    vocabulary = Vocabulary(smollm2_tokenizer)
    assert b"".join(map(vocabulary.bytes_of, encode(smollm2_tokenizer, text))) == text.encode()


@given(text=TEXTS.filter(lambda text: "▁" not in text and text))
@settings(deadline=None)
def test_byte_tokens_and_marked_spaces_have_the_bytes_of_their_text(sentencepiece_like, text):
    vocabulary = Vocabulary(sentencepiece_like)
    assert b"".join(map(vocabulary.bytes_of, encode(sentencepiece_like, text))) == b" " + text.encode()


@given(data=st.lists(st.sampled_from([b"a", b"\x80", "é".encode(), "😀".encode(), b"\xf0\x9f", b"\n"])).map(b"".join))
@settings(deadline=None)
def test_a_real_byte_fallback_decoder_streams_every_valid_character(sentencepiece_like, data):
    detokenizer = Detokenizer(sentencepiece_like.decode)
    tokens = [sentencepiece_like.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    text = "".join([detokenizer.add(token) for token in tokens]) + detokenizer.finish()
    assert text.replace("\ufffd", "") == data.decode("utf-8", "ignore")


def test_the_bytes_of_every_token_are_the_decoded_token(smollm2_tokenizer):
    vocabulary = Vocabulary(smollm2_tokenizer)
    ids = range(0, len(smollm2_tokenizer), 7)
    decoded = smollm2_tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    assert [vocabulary.bytes_of(token).decode("utf-8", "replace") for token in ids] == decoded


@pytest.mark.parametrize(("byte", "shown"), [(0xE2, "bytes:\\xe2"), (0x41, "A"), (0x0A, "\n"), (0x00, "\x00")])
def test_tokens_of_incomplete_characters_are_written_as_their_bytes(sentencepiece_like, byte, shown):
    vocabulary = Vocabulary(sentencepiece_like)
    token = sentencepiece_like.convert_tokens_to_ids(f"<0x{byte:02X}>")
    assert (vocabulary.bytes_of(token), vocabulary.text_of(token)) == (bytes([byte]), shown)


def test_added_tokens_have_their_literal_text(smollm2_tokenizer, sentencepiece_like):
    assert Vocabulary(smollm2_tokenizer).text_of(1) == "<|im_start|>"
    vocabulary = Vocabulary(sentencepiece_like)
    for name in ("<s>", "<tool ▁>"):
        assert vocabulary.text_of(sentencepiece_like.convert_tokens_to_ids(name)) == name


@pytest.mark.parametrize("token", [60_000, 10**9])
def test_an_id_outside_the_vocabulary_has_no_bytes(smollm2_tokenizer, sentencepiece_like, token):
    for tokenizer in (smollm2_tokenizer, sentencepiece_like, Slow()):
        vocabulary = Vocabulary(tokenizer)
        assert (vocabulary.bytes_of(token), vocabulary.text_of(token)) == (b"", "")


def test_tokens_of_other_decoders_and_without_a_backend_are_decoded_one_by_one():
    backend = Tokenizer(models.WordLevel({"hello": 0, "##lo": 1}, unk_token="hello"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert vocabulary.bytes_of(0) == b"hello"
    assert vocabulary.bytes_of(7) == b""
    assert [Vocabulary(Slow()).bytes_of(token) for token in (0, 1)] == ["€".encode(), b"b"]


class Slow:
    """A tokenizer in Python, without a backend."""

    def __len__(self):
        return 2

    def decode(self, tokens, clean_up_tokenization_spaces=True):
        return ["€", "b"][tokens[0]]
