"""Check the tokenizer of a model folder before it is loaded, and choose how its texts are encoded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers.models import BPE

from lmx_lab.engine.sandbox import SandboxDiedError, SandboxError, SandboxStartError, Setup, shared_pool
from lmx_lab.engine.tokenizing.encoder import WORKER, TextEncoder, find_unbounded_step, flatten
from lmx_lab.engine.tokenizing.worker import pack, unpack
from lmx_lab.errors import UnusableModelError
from lmx_lab.weights.files import in_thread, read_json

Tokenizer = TypeVar("Tokenizer")
LOAD_S = 30.0
"""Time limit for loading the tokenizer of a model folder in a sandbox process, including imports."""
USUAL_BYTES = 64 * 2**20
USUAL_ADDED_TOKENS = 10_000
"""Limits above which a tokenizer is first loaded in the sandbox process: the size of its file, and the number of tokens
that it adds to its vocabulary."""
PROBE = "Hello  world!\n<tool_call>1234 it's ünïcödé 東京 🦊\t<|im_end|> "
"""A text for which the code of a Python class and its Rust tokenizer must agree."""


async def check_tokenizer_files(folder: Path, *, read_s: float = 10.0) -> None:
    """Check that the tokenizer of a model folder can be loaded and used in this process.

    Tokens are decoded between the tokens of other answers, so a decoder without a bound is refused. A tokenizer that
    may take any time to load or to encode is loaded in a sandbox process first: loading it would hold Python's lock.

    Args:
        read_s: Limit of the CPU time for loading it, without imports. A vocabulary of 260,000 tokens takes 1 to 2 s.

    Raises:
        UnusableModelError: it cannot be used; the message has the reason.
    """
    if not await in_thread(partial(_needs_sandbox, folder)):
        return
    pool = shared_pool()
    try:
        # A setup of its own, so that the process computes nothing else and ends afterwards.
        message = pack({"load": str(folder)})
        answer, _ = unpack(await pool.run(WORKER, message, limit_s=LOAD_S, wait_s=0.0, setup=Setup(keep=False)))
        reason = answer.get("error")
        if reason is None and answer["load_s"] > read_s:
            reason = f"it takes {answer['load_s']:.0f} s to load; the limit is {read_s:g} s"
    except SandboxStartError as exc:
        reason = f"no process could be started to check it: {exc}"
    except SandboxDiedError:
        reason = "it ended the process in which it was loaded"
    except SandboxError:
        reason = f"it takes longer than {LOAD_S:g} s to load"
    if reason is not None:
        raise UnusableModelError(f"its tokenizer cannot be used: {reason}")


def _needs_sandbox(folder: Path) -> bool:
    """Return whether the tokenizer of a folder may take any time to load or to encode.

    Raises:
        UnusableModelError: its decoder may take any time.
    """
    path = folder / "tokenizer.json"
    try:
        is_large = path.stat().st_size > USUAL_BYTES
        content = json.loads(path.read_bytes())
    # Errors in files are reported by the code that loads them, in the process.
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, Mapping):
        return True
    try:
        decoder = find_unbounded_step(flatten(content.get("decoder")))
        steps = (step for name in ("normalizer", "pre_tokenizer") for step in flatten(content.get(name)))
        unbounded = find_unbounded_step(steps)
        added = len(content.get("added_tokens") or ())
        # The other files of a tokenizer also add tokens, one by one.
        for name in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
            with contextlib.suppress(UnusableModelError):
                other = read_json(folder / name)
                parts = [other.get(key) for key in ("added_tokens_decoder", "additional_special_tokens")]
                added += sum(len(part) for part in parts if isinstance(part, dict | list))
                added += len(other) if name == "added_tokens.json" else 0
    except (TypeError, AttributeError, ValueError, RecursionError):
        decoder, unbounded, added = None, "it has a part that is not in the usual form", 0
    if decoder is not None:
        raise UnusableModelError(f"its tokenizer cannot be used: the decoder may take any time, because {decoder}")
    return unbounded is not None or is_large or added > USUAL_ADDED_TOKENS


def read_tokens(folder: Path) -> list[str]:
    """Return the tokens of a model folder, in the order of their ids.

    Raises:
        UnusableModelError: the folder has no ``tokenizer.json`` with a vocabulary.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        known = content["model"]["vocab"]
        pairs = known.items() if isinstance(known, Mapping) else ((row[0], at) for at, row in enumerate(known))
        tokens = {int(at): str(token) for token, at in pairs}
        tokens |= {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UnusableModelError(f"{folder} has no tokenizer.json with a vocabulary: {exc!r}", param="draft") from exc
    return [tokens[at] for at in sorted(tokens)]


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
        (own,) = encoder.pool.portal.run(encoder.encode([PROBE], special=special))
        if encoder.is_bounded and own.ids != list(tokenizer.encode(PROBE, add_special_tokens=special)):
            return None
    return encoder


class SandboxedTokenizer:
    """A tokenizer of mlx-lm that encodes with a ``TextEncoder``, and does everything else itself. Blocks."""

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
        encoder = self._encoder
        return encoder.pool.portal.run(encoder.encode([text], special=add_special_tokens))[0].ids


def without_word_cache(tokenizer: Tokenizer) -> Tokenizer:
    """Disable the word cache of a tokenizer of transformers, and return the same tokenizer.

    tokenizers 0.23 caches up to 10,000 words of each BPE model in every thread that has encoded with it, including
    threads of its own. The cache is released when the thread ends, and not with the model: up to 3 MB for each load
    and thread.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if isinstance(model, BPE):
        model._resize_cache(0)
    return tokenizer
