"""Read from the steps of a tokenizer whether its time is bounded, and how much text a token can stand for. Pure.

A step is the JSON object of a normalizer, a pre-tokenizer or a decoder in ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.text.vocabulary import BYTES

Step = Mapping[str, Any]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KNOWN_PATTERNS = frozenset(
    {
        # Llama 3, Qwen 2 and GPT-2, and o200k of gpt-oss, whose time is linear.
        _WORDS + r"\p{N}{1,3}" + _REST,
        _WORDS + r"\p{N}" + _REST,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_ENDINGS}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Regular expressions of well-known models. Any other one may take exponential time."""
LINEAR_STEPS = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "BertNormalizer", "Strip", "ByteLevel"),
        *("Metaspace", "Digits", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation"),
        *("CharDelimiterSplit", "UnicodeScripts", "FixedLength", "Precompiled", "Prepend"),
        *("ByteFallback", "Fuse", "WordPiece", "BPEDecoder", "CTC"),
    }
)
"""Types of steps without a pattern, whose time is linear."""
KEEPING_STEPS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Prepend", "NFC"})
"""Types of steps that leave out no character. NFC makes the UTF-8 of a text shorter, at most by ``NFC_FACTOR``."""
NFC_FACTOR = 3
"""Largest expansion factor of NFD in UTF-8, of which NFC is the reverse (Unicode Technical Report 15, FAQ)."""
MAX_STEPS = 64
MAX_GROWTH = 64
"""Largest factor by which the replacements of a tokenizer may lengthen a text."""
MAX_WORD_CHARACTERS = 1000
"""WordPiece takes time quadratic in the length of a word, up to a limit that is 100 in practice."""
MAX_PIECE_CHARACTERS = 1000
"""Unigram takes time proportional to the length of its longest token."""


def flatten(step: Step | None) -> Iterator[Step]:
    """Iterate over a step, or the steps of a sequence."""
    if step is None:
        return
    parts = next((step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step), None)
    if parts is None:
        yield step
        return
    for part in parts:
        yield from flatten(part)


def step_of(component: Any) -> Step | None:
    """Return the JSON of a component of a tokenizer; None if there is none."""
    # The state is the only way to inspect a component; its classes have no attributes.
    return None if component is None else json.loads(component.__getstate__())


def find_unbounded_step(steps: Iterable[Step]) -> str | None:
    """Return a description of the first step whose time or result has no known bound; None if there is none."""
    growth = 1.0
    for number, step in enumerate(steps):
        if number == MAX_STEPS:
            return f"it has more than {MAX_STEPS} steps"
        kind, pattern = step.get("type"), step.get("pattern")
        if kind in {"Replace", "Split"} and isinstance(pattern, Mapping):
            regex, literal = pattern.get("Regex"), pattern.get("String")
            if regex is not None and (kind == "Replace" or regex not in KNOWN_PATTERNS):
                return f"a {kind} step has the regular expression {str(regex)[:100]!r}"
            if regex is None:
                growth *= max(1.0, len(str(step.get("content", ""))) / max(1, len(str(literal or ""))))
        elif kind == "Prepend":
            growth *= 1 + len(str(step.get("prepend", "")))
        elif kind not in LINEAR_STEPS:
            return f"it has a step of the type {kind}"
        if growth > MAX_GROWTH:
            return f"its replacements make a text more than {MAX_GROWTH} times as long"
    return None


def find_unbounded_part(backend: Any) -> str | None:
    """Return a description of the first part of a tokenizer that may take any time to encode; None if there is none."""
    reason = find_unbounded_step(
        step for part in (backend.normalizer, backend.pre_tokenizer) for step in flatten(step_of(part))
    )
    model = backend.model
    match type(model).__name__:
        case "WordPiece" if model.max_input_chars_per_word > MAX_WORD_CHARACTERS:
            return reason or f"its words have up to {model.max_input_chars_per_word} characters"
        case "Unigram" if max(map(len, backend.get_vocab())) > MAX_PIECE_CHARACTERS:
            return reason or f"it has a token of more than {MAX_PIECE_CHARACTERS} characters"
    return reason


@dataclass(frozen=True)
class TokenBound:
    """How much text a token can stand for."""

    bytes_per_token: int
    """Largest number of bytes of UTF-8 in one token."""
    dropped: bytes = b""
    """Bytes that the vocabulary lacks, which the tokenizer leaves out."""

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        data = text.encode()
        return len(data.translate(None, self.dropped) if self.dropped else data) // self.bytes_per_token


def token_bound(
    tokens: Iterable[str], added: Iterable[str] = (), *, byte_level: bool, factor: int = 1
) -> TokenBound | None:
    """Return the bound of a vocabulary that encodes any text completely; None if it does not.

    Args:
        added: Tokens that are text, as special tokens are.
        byte_level: Whether each character of the other tokens stands for a byte. If not, they are text, and there must
            be a token such as ``<0x0A>`` for each byte.
        factor: Largest factor by which normalization makes the UTF-8 of a text shorter.
    """
    known = set(tokens)
    if not byte_level and any(f"<0x{byte:02X}>" not in known for byte in range(256)):
        return None
    longest = max(map(len if byte_level else _utf8_length, known), default=1)
    longest = max(longest, max(map(_utf8_length, added), default=1))
    dropped = bytes(byte for character, byte in BYTES.items() if character not in known) if byte_level else b""
    return TokenBound(factor * longest, dropped)


def _utf8_length(text: str) -> int:
    return len(text.encode(errors="replace"))


def bound_of(backend: Any) -> TokenBound | None:
    """Return how much text a token of this tokenizer can stand for; None if there is no bound.

    Args:
        backend: A ``tokenizers.Tokenizer``.
    """
    normalizers = list(flatten(step_of(backend.normalizer)))
    steps = [*normalizers, *flatten(step_of(backend.pre_tokenizer))]
    added = backend.get_added_tokens_decoder().values()
    # A token that strips takes any number of spaces beside it.
    if not all(map(_keeps_text, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    model, byte_level = backend.model, any(step["type"] == "ByteLevel" for step in steps)
    match type(model).__name__:
        case "BPE":
            has_affixes = model.continuing_subword_prefix or model.end_of_word_suffix
            if has_affixes or not (byte_level or model.byte_fallback):
                return None
        case "Unigram":
            if byte_level or not model.byte_fallback:
                return None
        case _:
            return None
    factor = NFC_FACTOR ** sum(step["type"] == "NFC" for step in normalizers)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return token_bound(vocabulary, (token.content for token in added), byte_level=byte_level, factor=factor)


def _keeps_text(step: Step) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new.encode()) >= len(old.encode())
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
    return step["type"] in KEEPING_STEPS
