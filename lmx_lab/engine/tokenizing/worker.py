"""Sandbox worker that encodes texts with the tokenizer of a model (see ``sandbox_worker``).

Tokenizers are programs that come with models: a regular expression of theirs can run forever, and others panic. A
request is a JSON header, framed by its length, followed by data. The header has one of these forms:

- ``{"build": true}``: the data is the JSON of the tokenizer that the following requests use. The answer is empty.
- ``{"load": path}``: load the tokenizer of a model folder as the engine would; ``load_s`` is the CPU time that it took.
- ``{"sizes": [...], ...}``: encode texts; ``sizes`` are the lengths of their UTF-8, and the data is that UTF-8.

Every other answer has the same form. Its header contains ``error`` if the tokenizer failed; its data are token ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_BYTES = 8 * 2**30
"""Address space of the process; a text of 8 MB takes up to 2 GB. macOS does not enforce this limit."""
CPU_S = 30
NICENESS = 5
"""Long texts are less urgent than the requests that the engine computes."""
_tokenizers: list[Any] = []
"""The current tokenizer."""
_importing = threading.Lock()


def pack(header: dict[str, Any], data: bytes = b"") -> bytes:
    """Return a message with a header and data."""
    head = json.dumps(header).encode()
    return len(head).to_bytes(4, "little") + head + data


def unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data of a message."""
    end = 4 + int.from_bytes(message[:4], "little")
    return json.loads(message[4:end]), memoryview(message)[end:]


def handle(request: bytes) -> bytes:
    """Answer one request; see the module's docstring."""
    header, data = unpack(request)
    if "build" in header:
        # Not when this file is imported, because the parent also imports it.
        with contextlib.suppress(OSError):
            os.nice(max(0, NICENESS - os.nice(0)))
        from tokenizers import Tokenizer  # not needed by the parent, which imports ``pack`` and ``unpack``

        tokenizer = Tokenizer.from_buffer(bytes(data))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _tokenizers[:] = [tokenizer]
        return b""
    try:
        if "load" in header:
            with keep_descriptor_limit():
                from mlx_lm import tokenizer_utils  # slow to import, and needed for few models

            started = time.process_time()
            tokenizer_utils.load(Path(header["load"]))
            return pack({"load_s": time.process_time() - started})
        texts: list[Any] = []
        start = 0
        for size in header["sizes"]:
            texts.append(str(data[start : start + size], "utf-8"))
            start += size
        if header["pairs"]:
            texts = list(zip(texts[::2], texts[1::2], strict=True))
        options = {name: header[name] for name in ("special", "keep", "truncation", "starts")}
        lengths, seconds, numbers = [], [], array("I")
        for encoded in encode(_tokenizers[0], texts, **options):
            lengths.append(encoded.length)
            seconds.append(encoded.second_start)
            numbers.extend(encoded.ids)
            numbers.extend(encoded.starts)
        return pack({"lengths": lengths, "seconds": seconds}, numbers.tobytes())
    # Also panics of Rust, which are not subclasses of ``Exception``.
    except BaseException as exc:
        return pack({"error": f"{type(exc).__name__}: {exc}"[:500]})


@contextlib.contextmanager
def keep_descriptor_limit() -> Iterator[None]:
    """Keep the limit of open files of this process in the block, which imports mlx-lm.

    mlx-lm sets it to 2,048, and the hard limit to 4,096. The process could not raise a lowered hard limit again, and a
    hard limit below 4,096 would make the import fail.
    """
    with _importing:
        set_limit, importer = resource.setrlimit, threading.get_ident()

        def set_other_limit(kind: int, limits: tuple[int, int], /) -> None:
            if kind != resource.RLIMIT_NOFILE or threading.get_ident() != importer:
                set_limit(kind, limits)

        resource.setrlimit = set_other_limit
        try:
            yield
        finally:
            resource.setrlimit = set_limit


class EncodedText(NamedTuple):
    """The tokens of a text or of a pair."""

    ids: list[int]
    """The first tokens: all of them, unless the caller needs fewer."""
    length: int
    """Number of all tokens."""
    second_start: int | None = None
    """Index of the first token of the second text of a pair, for tokenizers that mark it."""
    starts: Sequence[int] = ()
    """Index of the first character of each token, if the caller asked for it."""


def encode(
    tokenizer: Any,
    texts: list[Any],
    *,
    special: bool,
    keep: int | None,
    truncation: tuple[int, str] | None,
    starts: bool,
) -> Iterator[EncodedText]:
    """Encode texts or pairs with a ``tokenizers.Tokenizer``; for the arguments, see ``TextEncoder.encode``."""
    if truncation is not None:
        tokenizer.enable_truncation(truncation[0], strategy=truncation[1])
    try:
        encode_batch = tokenizer.encode_batch if starts else tokenizer.encode_batch_fast
        encodings = encode_batch(texts, add_special_tokens=special)
    finally:
        if truncation is not None:
            tokenizer.no_truncation()
    for text, encoding in zip(texts, encodings, strict=True):
        ids, kinds = encoding.ids, [] if isinstance(text, str) else encoding.type_ids
        second_start = kinds.index(1) if 1 in kinds else None
        places = [start for start, _ in encoding.offsets[:keep]] if starts else ()
        yield EncodedText(ids if keep is None else ids[:keep], len(ids), second_start, places)
