"""Tests that the vocabulary of a GGUF file gives the original tokenizer."""

import io
import random

import pytest
import sentencepiece

from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.tokenizer import build_tokenizer, read_vocabulary
from tests.support.gguf import gguf_bytes

TEXT = "the cat sat on a mat while rain fell over old stone roofs and nobody came to see it at all naïve 日本"
WORDS = TEXT.split()


def tokenizer_of(path, data):
    path.write_bytes(data)
    header = read_header(path, arrays=True)
    return build_tokenizer(read_vocabulary(header), header.text("tokenizer.ggml.model"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", "Ġ12345"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45"]),
    ],
)
def test_words_are_split_as_the_file_defines(tmp_path, tiny_llama, pre, pieces):
    tokenizer = tokenizer_of(tmp_path / "t.gguf", tiny_llama(metadata={"tokenizer.ggml.pre": pre}))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'm 12345")] == pieces


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_first_token_is_added_if_the_file_requires_it(tmp_path, tiny_llama, add_bos):
    metadata = {"tokenizer.ggml.add_bos_token": add_bos}
    tokenizer = tokenizer_of(tmp_path / "t.gguf", tiny_llama(metadata=metadata))
    assert tokenizer.encode("ab").ids == ([257, 256] if add_bos else [256])
    assert tokenizer.encode("tool<|im_end|>", add_special_tokens=False).ids == [259, 258]


@pytest.fixture(scope="module")
def trained():
    """Train SentencePiece as for Llama 2: BPE, bytes for unknown characters, a leading space."""
    chance = random.Random(0)
    sentences = (" ".join(chance.choices(WORDS, k=12)) for _ in range(400))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, vocab_size=380, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_sentencepiece_vocabulary_encodes_and_decodes_like_sentencepiece(tmp_path, trained):
    ids = range(trained.vocab_size())
    kinds = [
        6 if trained.is_byte(i) else 3 if trained.is_control(i) else 2 if trained.is_unknown(i) else 1 for i in ids
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = tokenizer_of(tmp_path / "spm.gguf", gguf_bytes(metadata, {}))
    chance = random.Random(1)
    for _ in range(300):
        words = [*chance.choices(WORDS, k=6), "".join(chance.choices("abcdehilnorst 🎉é\n\t  ", k=9))]
        text = " ".join(words)
        encoding = tokenizer.encode(text)
        assert encoding.ids == [1, *trained.encode(text)]
        assert tokenizer.decode(encoding.ids) == text
