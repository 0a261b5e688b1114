"""Check the tokenizer of a model folder before it is loaded, and choose how its texts are encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmx_lab.engine.sandbox_process import SandboxDiedError, SandboxProcess, SandboxStartError, SandboxTimeoutError
from lmx_lab.engine.tokenizing.bounds import find_unbounded_step, flatten
from lmx_lab.engine.tokenizing.encoder import START_S, WORKER, TextEncoder, TextWork, sandbox_environ
from lmx_lab.engine.tokenizing.worker import pack, unpack
from lmx_lab.errors import UnusableModelError

LOAD_S = 30.0
"""Time that the tokenizer of a model folder may take to load, imports included."""
PROBE = "Hello  world!\n<tool_call>1234 it's ünïcödé 東京 🦊\t<|im_end|> "
"""A text for which the code of a Python class and its Rust tokenizer must agree."""


def check_tokenizer_files(folder: Path) -> None:
    """Check that the tokenizer of a model folder can be loaded and used in this process.

    Tokens are decoded between the tokens of other answers, so a decoder without a bound is refused. A tokenizer that
    may take any time to encode is loaded in a sandbox process first, because loading encodes its added tokens.

    Raises:
        UnusableModelError: it cannot be used; the message has the reason.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
    # Other tokenizers have no steps of their own. Errors in files are reported by the code that loads them.
    except (OSError, ValueError):
        return
    if not isinstance(content, Mapping):
        return
    try:
        decoder = find_unbounded_step(flatten(content.get("decoder")))
        steps = (step for name in ("normalizer", "pre_tokenizer") for step in flatten(content.get(name)))
        unbounded = find_unbounded_step(steps)
    except (TypeError, AttributeError, ValueError, RecursionError):
        decoder, unbounded = None, "it has a part that is not in the usual form"
    if decoder is not None:
        raise UnusableModelError(f"its tokenizer cannot be used: the decoder may take any time, because {decoder}")
    if unbounded is not None:
        _load_in_sandbox(folder)


def _load_in_sandbox(folder: Path) -> None:
    process = SandboxProcess(WORKER, sandbox_environ, start_s=START_S)
    try:
        answer, _ = unpack(process.request(pack({"load": str(folder)}), LOAD_S))
        reason = answer.get("error")
    except SandboxTimeoutError:
        reason = f"it takes longer than {LOAD_S:g} s to load"
    except SandboxStartError as exc:
        reason = f"no process could be started to check it: {exc}"
    except SandboxDiedError:
        reason = "it ended the process in which it was loaded"
    finally:
        process.close()
    if reason is not None:
        raise UnusableModelError(f"its tokenizer cannot be used: {reason}")


def build_encoder(tokenizer: Any, model: str) -> TextEncoder | None:
    """Return an encoder for a tokenizer of mlx-lm; None if it is written in Python, or changes texts there."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # The files may enable both; prompts are never cut.
    backend.no_truncation()
    backend.no_padding()
    encoder = TextEncoder(backend, model)
    for special in (True, False):
        (own,) = encoder.encode([PROBE], TextWork(), special=special)
        if encoder.is_bounded and own.ids != list(tokenizer.encode(PROBE, add_special_tokens=special)):
            return None
    return encoder


class SandboxedTokenizer:
    """A tokenizer of mlx-lm that encodes with a ``TextEncoder``, and does everything else itself."""

    def __init__(self, tokenizer: Any, encoder: TextEncoder) -> None:
        self._wrapped = tokenizer
        self._encoder = encoder

    @classmethod
    def wrap(cls, tokenizer: Any, encoder: TextEncoder | None) -> Any:
        """Return the tokenizer itself if its time is bounded, or unknown."""
        return tokenizer if encoder is None or encoder.is_bounded else cls(tokenizer, encoder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._encoder.encode([text], TextWork(), special=add_special_tokens)[0].ids
