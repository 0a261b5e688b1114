"""Encode texts with a model's tokenizer: in this process if that is certain to be quick, or in a sandbox.

Whether the time of short texts is bounded is read from the steps of the tokenizer. A step is the JSON object of a
normalizer, a pre-tokenizer or a decoder in ``tokenizer.json``.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.engine.sandbox import (
    SandboxBusyError,
    SandboxDiedError,
    SandboxPool,
    SandboxStartError,
    SandboxTimeoutError,
    Setup,
    shared_pool,
)
from lmx_lab.engine.tokenizing.worker import EncodedText, encode, pack, unpack
from lmx_lab.errors import EngineError, InvalidRequestError, QueueFullError

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 4.0
"""Time from the arrival of a text until its tokens are there."""
SHORT_CHARACTERS = 50_000
"""Number of characters that are encoded in this process, which takes up to 20 ms."""
Text = TypeVar("Text", str, tuple[str, str])


class TextEncoder:
    """Encodes texts with one tokenizer. May be used on any loop.

    Args:
        backend: A ``tokenizers.Tokenizer`` that is not modified while this uses it.
        model: Id of the model, for messages.
        limit_s: Time limit for encoding texts outside this process, from their arrival.
    """

    def __init__(self, backend: Any, model: str, *, limit_s: float = LIMIT_S, pool: SandboxPool | None = None) -> None:
        self._backend = backend
        self._model = model
        self._limit_s = limit_s
        self.is_bounded = find_unbounded_part(backend) is None
        """Whether a short text is certain to take a short time."""
        self.pool = pool or shared_pool()
        # The process of a bounded tokenizer is needed for long texts only.
        self._setup = Setup(lambda: pack({"build": True}, backend.to_str().encode()), keep=not self.is_bounded)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-texts")

    async def encode(
        self,
        texts: Sequence[Text],
        *,
        param: str | None = None,
        special: bool = True,
        keep: int | None = None,
        truncation: tuple[int, str] | None = None,
        starts: bool = False,
    ) -> list[EncodedText]:
        """Encode texts or pairs.

        Args:
            param: Name of the texts in the request, for messages.
            special: Whether special tokens are added.
            keep: Number of tokens of each text that are needed.
            truncation: Number of tokens to which texts are truncated, and the strategy of tokenizers.
            starts: Whether the caller needs ``EncodedText.starts``.

        Raises:
            InvalidRequestError: the tokenizer takes longer than its limit, or fails.
            QueueFullError: other texts were encoded for so long.
        """
        if not texts:
            return []
        pairs = not isinstance(texts[0], str)
        flat = [part for text in texts for part in ((text,) if isinstance(text, str) else text)]
        length = sum(map(len, flat))
        options: dict[str, Any] = {"special": special, "keep": keep, "truncation": truncation, "starts": starts}
        if self.is_bounded and length <= SHORT_CHARACTERS:
            work = partial(self._encode_here, list(texts), param, options)
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        parts = [part.encode() for part in flat]
        message = pack({"sizes": [len(part) for part in parts], "pairs": pairs, **options}, b"".join(parts))
        del flat, parts
        answer, data = unpack(await self._ask(message, param))
        if "error" in answer:
            raise self._failure(answer["error"], param)
        numbers = array("I")
        numbers.frombytes(data)
        found, at = [], 0
        for size, second_start in zip(answer["lengths"], answer["seconds"], strict=True):
            kept = size if keep is None else min(size, keep)
            ids, at = numbers[at : at + kept].tolist(), at + kept
            places: Sequence[int] = ()
            if starts:
                places, at = numbers[at : at + kept].tolist(), at + kept
            found.append(EncodedText(ids, size, second_start, places))
        return found

    async def _ask(self, message: bytes, param: str | None) -> bytes:
        what = param or "the text"
        try:
            return await self.pool.run(WORKER, message, limit_s=self._limit_s, wait_s=0.0, setup=self._setup)
        except SandboxStartError as exc:
            raise EngineError(f"no process could be started for the tokenizer of {self._model}: {exc}") from exc
        except SandboxBusyError as exc:
            raise QueueFullError(
                f"{what} was not tokenized within {self._limit_s:g} s, because other texts were; try again in 2 s, or "
                "send less",
                retry_after_s=2,
            ) from exc
        except SandboxTimeoutError as exc:
            raise InvalidRequestError(
                f"the tokenizer of {self._model} takes longer than the limit of {self._limit_s:g} s for {what}; send "
                "less, or use another model",
                param=param,
            ) from exc
        except SandboxDiedError as exc:
            raise InvalidRequestError(
                f"the tokenizer of {self._model} has ended the process in which it ran; send less than {what}, or use "
                "another model",
                param=param,
            ) from exc

    def _encode_here(self, texts: list[Any], param: str | None, options: dict[str, Any]) -> list[EncodedText]:
        try:
            return [*encode(self._backend, texts, **options)]
        except BaseException as exc:
            if isinstance(exc, Exception) or is_panic(exc):
                raise self._failure(exc, param) from None
            raise

    def _failure(self, reason: object, param: str | None) -> InvalidRequestError:
        what = param or "the text"
        return InvalidRequestError(f"the tokenizer of {self._model} fails with {what}: {reason}", param=param)


def is_panic(exc: BaseException) -> bool:
    """Return whether an exception is a panic of Rust code. Its class cannot be imported and is not an ``Exception``."""
    return type(exc).__name__ == "PanicException"


# Bounds of the time

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
