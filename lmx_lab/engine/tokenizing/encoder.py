"""Encode texts with a model's tokenizer: in this process if that is certain to be quick, or in a sandbox process.

The sandbox process has a deadline, encodes the shortest text first, and ends when the caller of its text is cancelled.
Short texts never wait for it if the time of their tokenizer is bounded. Whether the time is bounded, and how much text
a token can stand for, is read from the steps of the tokenizer. A step is the JSON object of a normalizer, a
pre-tokenizer or a decoder in ``tokenizer.json``.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.engine.sandbox_process import (
    SandboxDiedError,
    SandboxProcess,
    SandboxSendError,
    SandboxStartError,
    SandboxTimeoutError,
)
from lmx_lab.engine.text.vocabulary import BYTES
from lmx_lab.engine.tokenizing.worker import pack, unpack
from lmx_lab.errors import EngineError, InvalidRequestError, QueueFullError
from lmx_lab.settings import without_secrets

WORKER = Path(__file__).with_name("worker.py")
START_S = 30.0
LIMIT_S = 4.0
"""Time from the arrival of a text until its tokens are there."""
SHARE_S = 0.25
"""Time after which a text gives way to texts that were not encoded for that long."""
SHORTER = 4
"""Factor by which a text must be shorter than another one that gives way to it, if the time of both is bounded."""
IDLE_S = 20.0
"""Time without a text after which the process ends, if it is needed for long texts only."""
SHORT_CHARACTERS = 50_000
"""Number of characters that are encoded in this process, which takes up to 20 ms."""
Text = TypeVar("Text", str, tuple[str, str])


class CancelledTextError(Exception):
    """The caller does not need the tokens any more."""


@dataclass(eq=False)
class TextWork:
    """The work for one request: its deadline, how long its texts were encoded, and whether it was cancelled."""

    arrived_at: float = field(default_factory=time.monotonic)
    used_s: float = 0.0
    """Time for which the process has encoded its current text, including attempts that gave way."""
    length: int = 0
    """Number of characters of its current text."""
    gave_way: bool = False
    _cancelled: bool = False

    @property
    def order(self) -> tuple[bool, int, float]:
        """The work with the least value goes first."""
        return self.used_s >= SHARE_S, self.length, self.arrived_at

    @property
    def left_s(self) -> float:
        return self.arrived_at + LIMIT_S - time.monotonic()

    def cancel(self) -> None:
        """End the work. Idempotent; may be called from any thread."""
        self._cancelled = True

    def check(self) -> None:
        """Check that the work is still needed.

        Raises:
            CancelledTextError: it was cancelled.
        """
        if self._cancelled:
            raise CancelledTextError


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text or of a pair."""

    ids: list[int]
    """The first tokens: all of them, unless the caller needs fewer."""
    length: int
    """Number of all tokens."""
    second_start: int | None = None
    """Index of the first token of the second text of a pair, for tokenizers that mark it."""
    starts: Sequence[int] = ()
    """Index of the first character of each token, if the caller asked for it."""


class TextEncoder:
    """Encodes texts with one tokenizer.

    Several threads may encode texts for which ``is_quick`` is False; one thread at a time the others.

    Args:
        backend: A ``tokenizers.Tokenizer`` that is not modified while this uses it.
        model: Id of the model, for messages.
    """

    def __init__(self, backend: Any, model: str) -> None:
        self._backend = backend
        self._model = model
        self.is_bounded = find_unbounded_part(backend) is None
        """Whether a short text is certain to take a short time."""
        self._sandbox = _Sandbox(self.is_bounded)
        self._bound: tuple[TokenBound | None] | None = None
        weakref.finalize(self, self._sandbox.close)

    def is_quick(self, characters: int) -> bool:
        """Return whether texts with this many characters in all are encoded in this process."""
        return self.is_bounded and characters <= SHORT_CHARACTERS

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least, without encoding it."""
        if self._bound is None:
            self._bound = (bound_of(self._backend),)
        (bound,) = self._bound
        return bound.min_tokens(text) if bound is not None else 0

    def encode(
        self,
        texts: Sequence[Text],
        work: TextWork,
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
            InvalidRequestError: the tokenizer takes longer than ``LIMIT_S``, or fails.
            QueueFullError: other texts were encoded for so long.
            CancelledTextError: the work was cancelled.
        """
        if not texts:
            return []
        pairs = not isinstance(texts[0], str)
        flat = [part for text in texts for part in ((text,) if isinstance(text, str) else text)]
        length = sum(map(len, flat))
        if self.is_quick(length):
            return self._encode_here(texts, param, special=special, keep=keep, truncation=truncation, starts=starts)
        parts = [part.encode() for part in flat]
        header = {
            "sizes": [len(part) for part in parts],
            "pairs": pairs,
            "special": special,
            "keep": keep,
            "truncation": truncation,
            "starts": starts,
        }
        message = pack(header, b"".join(parts))
        del flat, parts
        answer, data = unpack(self._request(message, length, work, param))
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

    def _request(self, message: bytes, length: int, work: TextWork, param: str | None) -> bytes:
        what = param or "the text"
        try:
            return self._sandbox.request(
                message, length, work, lambda: pack({"build": True}, self._backend.to_str().encode())
            )
        except SandboxStartError as exc:
            raise EngineError(f"no process could be started for the tokenizer of {self._model}: {exc}") from exc
        except SandboxTimeoutError as exc:
            if work.gave_way or work.used_s < LIMIT_S / 2:
                raise QueueFullError(
                    f"{what} was not tokenized within {LIMIT_S:g} s, because other texts were; try again in 2 s, or "
                    "send less",
                    retry_after_s=2,
                ) from exc
            raise InvalidRequestError(
                f"the tokenizer of {self._model} takes longer than the limit of {LIMIT_S:g} s for {what}; send less, "
                "or use another model",
                param=param,
            ) from exc
        except SandboxDiedError as exc:
            raise InvalidRequestError(
                f"the tokenizer of {self._model} has ended the process in which it ran; send less than {what}, or use "
                "another model",
                param=param,
            ) from exc

    def _encode_here(
        self,
        texts: Sequence[Any],
        param: str | None,
        *,
        special: bool,
        keep: int | None,
        truncation: tuple[int, str] | None,
        starts: bool,
    ) -> list[EncodedText]:
        backend = self._backend
        if truncation is not None:
            backend.enable_truncation(truncation[0], strategy=truncation[1])
        try:
            encode = backend.encode_batch if starts else backend.encode_batch_fast
            encodings = encode(list(texts), add_special_tokens=special)
        except BaseException as exc:
            if isinstance(exc, Exception) or is_panic(exc):
                raise self._failure(exc, param) from None
            raise
        finally:
            if truncation is not None:
                backend.no_truncation()
        found = []
        for encoding in encodings:
            ids, kinds = encoding.ids, encoding.type_ids
            second_start = kinds.index(1) if 1 in kinds else None
            places = [start for start, _ in encoding.offsets[:keep]] if starts else ()
            found.append(EncodedText(ids if keep is None else ids[:keep], len(ids), second_start, places))
        return found

    def _failure(self, reason: object, param: str | None) -> InvalidRequestError:
        what = param or "the text"
        return InvalidRequestError(f"the tokenizer of {self._model} fails with {what}: {reason}", param=param)


def is_panic(exc: BaseException) -> bool:
    """Return whether an exception is a panic of Rust code. Its class cannot be imported and is not an ``Exception``."""
    return type(exc).__name__ == "PanicException"


class _Sandbox:
    """The process of one tokenizer, and the order in which texts are encoded in it.

    A text goes first if it has not used its share of time, and is the shortest of those. A text that takes longer than
    its share is stopped for such a text, and encoded again later.
    """

    def __init__(self, is_bounded: bool) -> None:
        self._is_bounded = is_bounded
        self._process = SandboxProcess(WORKER, sandbox_environ, start_s=START_S)
        self._built = 0
        """Number of the process start whose process has the tokenizer."""
        self._changed = threading.Condition()
        self._waiting: list[TextWork] = []
        self._running: TextWork | None = None
        self._idle: threading.Timer | None = None
        self._closed = False

    def request(self, message: bytes, length: int, work: TextWork, build: Callable[[], bytes]) -> bytes:
        """Send a message when it is its turn, and return the reply.

        Raises:
            SandboxStartError, SandboxTimeoutError, SandboxDiedError: as ``SandboxProcess.request``.
            CancelledTextError: the work was cancelled.
        """
        work.length, work.used_s = length, 0.0
        while True:
            self._wait_for_turn(work)
            began = time.monotonic()
            try:
                return self._send(message, work, build)
            except _GaveWayError:
                work.gave_way = True
            finally:
                work.used_s += time.monotonic() - began
                self._end_turn()

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        self._process.close()

    def _wait_for_turn(self, work: TextWork) -> None:
        with self._changed:
            self._waiting.append(work)
            try:
                while self._running is not None or min(self._waiting, key=lambda other: other.order) is not work:
                    work.check()
                    if work.left_s <= 0:
                        raise SandboxTimeoutError("other texts were encoded")
                    self._changed.wait(0.1)
                self._running = work
            finally:
                self._waiting.remove(work)
                self._changed.notify_all()
            if self._idle is not None:
                self._idle.cancel()

    def _end_turn(self) -> None:
        with self._changed:
            self._running = None
            self._changed.notify_all()
            if self._is_bounded and not self._waiting and not self._closed:
                self._idle = threading.Timer(IDLE_S, self._stop_if_idle)
                self._idle.daemon = True
                self._idle.start()

    def _stop_if_idle(self) -> None:
        with self._changed:
            if self._running is None and not self._waiting:
                self._process.stop()

    def _send(self, message: bytes, work: TextWork, build: Callable[[], bytes]) -> bytes:
        for attempt in (1, 2):
            self._process.start()
            if self._built != self._process.starts:
                answer, _ = unpack(self._process.request(build(), START_S, while_waiting=lambda _: work.check()))
                if "error" in answer:
                    return pack(answer)
                self._built = self._process.starts
            try:
                return self._process.request(
                    message, max(0.0, work.left_s), while_waiting=lambda waited_s: self._give_way(work, waited_s)
                )
            except SandboxSendError:
                # The process was killed from outside since the last text.
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _give_way(self, work: TextWork, waited_s: float) -> None:
        work.check()
        if waited_s < SHARE_S:
            return
        with self._changed:
            others = [other for other in self._waiting if other.used_s < SHARE_S]
        if self._is_bounded:
            others = [other for other in others if other.length * SHORTER < work.length]
        if others:
            raise _GaveWayError


class _GaveWayError(Exception):
    """Another text goes first."""


def sandbox_environ() -> dict[str, str]:
    """Return the environment of the sandbox process."""
    # A single thread, so that the other cores compute requests.
    return without_secrets(os.environ) | {"TOKENIZERS_PARALLELISM": "false"}


# Bounds of the time and of the number of tokens

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
