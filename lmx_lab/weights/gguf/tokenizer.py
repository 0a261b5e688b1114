"""Build ``tokenizer.json`` and ``tokenizer_config.json`` from the vocabulary inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.gguf.header import GgufHeader

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_turn|>")
HARMONY_ENDS = ("<|return|>", "<|call|>")


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """The vocabulary of a GGUF file, from its metadata ``tokenizer.ggml.*``."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    pre: str
    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    eot: int | None
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None

    def of_type(self, *types: int) -> list[str]:
        """Return the tokens of these types."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def token(self, index: int | None) -> str | None:
        """Return a token by its id; None if there is none."""
        return self.tokens[index] if index is not None and 0 <= index < len(self.tokens) else None


def read_vocabulary(header: GgufHeader) -> GgufVocabulary:
    """Read the vocabulary from a header that was read with its arrays.

    Raises:
        UnusableModelError: it is empty, contains a token twice, or its parts are inconsistent.
    """
    key = "tokenizer.ggml."
    tokens = [str(token) for token in header.items(f"{key}tokens")]
    types = [int(kind) for kind in header.items(f"{key}token_type")] or [1] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UnusableModelError(f"{header.path} has no usable vocabulary: {len(tokens)} tokens, {len(types)} types")
    pre = header.text(f"{key}pre") or "default"
    is_spm = header.text(f"{key}model") == "llama"
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        merges=[str(merge) for merge in header.items(f"{key}merges")],
        scores=[float(score) for score in header.items(f"{key}scores")],
        pre=pre,
        bos=header.integer(f"{key}bos_token_id"),
        eos=header.integer(f"{key}eos_token_id"),
        unknown=header.integer(f"{key}unknown_token_id"),
        pad=header.integer(f"{key}padding_token_id"),
        eot=header.integer(f"{key}eot_token_id"),
        # The defaults of llama.cpp.
        add_bos=header.flag(f"{key}add_bos_token", default=is_spm or pre in LLAMA3_NAMES),
        add_space_prefix=header.flag(f"{key}add_space_prefix", default=is_spm),
        chat_template=header.text("tokenizer.chat_template"),
    )


def build_tokenizer(vocabulary: GgufVocabulary, model: str | None) -> Tokenizer:
    """Build a tokenizer for a vocabulary of kind ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece).

    Raises:
        UnusableModelError: the kind or the pre-tokenizer is not supported, or the vocabulary is inconsistent.
    """
    if model not in BUILDERS:
        raise UnusableModelError(
            f"a vocabulary of kind {model} cannot be converted; supported are {', '.join(BUILDERS)}"
        )
    tokenizer = BUILDERS[model](vocabulary)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in vocabulary.of_type(CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.of_type(USER_DEFINED)])
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise UnusableModelError("the vocabulary cannot be rebuilt: special tokens changed its size")
    bos = vocabulary.token(vocabulary.bos)
    if vocabulary.add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocabulary.bos or 0)]
        )
    return tokenizer


def tokenizer_config(vocabulary: GgufVocabulary, context_length: int | None) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token(vocabulary.bos),
        "eos_token": vocabulary.token(vocabulary.eos),
        "unk_token": vocabulary.token(vocabulary.unknown),
        "pad_token": vocabulary.token(vocabulary.pad) or vocabulary.token(vocabulary.eos),
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": vocabulary.chat_template,
    }
    return {key: value for key, value in config.items() if value is not None}


def eos_ids(vocabulary: GgufVocabulary) -> list[int]:
    """Return all tokens that end a turn: the declared ones, and known ones that the chat template contains."""
    template = vocabulary.chat_template or ""
    control = set(vocabulary.of_type(CONTROL))
    # In the format of gpt-oss, <|end|> only ends a part of the turn.
    names = HARMONY_ENDS if control.issuperset(HARMONY_ENDS) else TURN_ENDS
    ends = [vocabulary.tokens.index(token) for token in names if token in template and token in control]
    declared = [index for index in (vocabulary.eos, vocabulary.eot) if vocabulary.token(index) is not None]
    return list(dict.fromkeys([*(index for index in declared if index is not None), *ends]))


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    if vocabulary.pre not in SPLITS:
        raise UnusableModelError(
            f"the pre-tokenizer {vocabulary.pre!r:.40} of this vocabulary is not supported; supported are "
            f"{', '.join(SPLITS)}"
        )
    parts = [merge.partition(" ") for merge in vocabulary.merges]
    merges = [(left, right) for left, _, right in parts]
    if not merges or not all(left and right for left, right in merges):
        raise UnusableModelError("the vocabulary has no valid merges")
    tokenizer = _bpe(vocabulary, merges, ignore_merges=vocabulary.pre in LLAMA3_NAMES)
    tokenizer.pre_tokenizer = SPLITS[vocabulary.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise UnusableModelError("the vocabulary does not have a score for each token")
    if len(vocabulary.of_type(BYTE)) != 256:
        raise UnusableModelError("the vocabulary does not have a token for each byte")
    unknown = vocabulary.token(vocabulary.unknown if vocabulary.unknown is not None else 0)
    # SentencePiece joins the neighbours whose union has the best score. Every split of a token is therefore a merge, in
    # the order of the scores.
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    by_score = sorted(range(len(ids)), key=lambda index: -vocabulary.scores[index])
    tokens = (vocabulary.tokens[index] for index in by_score if vocabulary.types[index] == 1)
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        # The longest pieces that SentencePiece trains have 16 characters; 256 limit malicious vocabularies.
        for cut in range(1, min(len(token), 256))
        if token[:cut] in ids and token[cut:] in ids
    ]
    tokenizer = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prepend = [normalizers.Prepend("▁")] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as exc:  # the Rust side raises bare Exception
        raise UnusableModelError(f"the vocabulary cannot be rebuilt: {exc}") from exc


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _llama3_split() -> pre_tokenizers.PreTokenizer:
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(words, "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_split,
    "gpt-2": _gpt2_split,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()]),
    **dict.fromkeys(LLAMA3_NAMES, _llama3_split),
}
BUILDERS: dict[str, Callable[[GgufVocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
