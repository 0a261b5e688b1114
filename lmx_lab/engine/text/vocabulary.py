"""What each token stands for, in bytes: tokens need not end where characters do, and the chat format shows which."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Decoder = Callable[[str], bytes]
BYTE_TOKEN_LENGTH = len("<0x00>")


class Vocabulary:
    """Token ids to bytes and text, each worked out when first asked for. Engine thread only.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Decoder | None = None
        self._literal: dict[int, str] = {}
        self._special = {int(token) for token in getattr(tokenizer, "all_special_ids", ())}
        if self._backend is not None:
            self._decode = decoder_of(self._backend)
            added = self._backend.get_added_tokens_decoder().items()
            self._literal = {int(id_): token.content for id_, token in added}
            self._special |= {int(id_) for id_, token in added if token.special}
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Its bytes inside a text, a leading space included; a special token's are its name. Unknown ids have none."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find(token)
        return found

    def is_special(self, token: int) -> bool:
        """Whether an answer does not show it."""
        return token in self._special

    def text_of(self, token: int) -> str:
        """Its bytes as text, or ``bytes:\\xe2\\x82`` where they are no whole characters."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find(self, token: int) -> bytes:
        if token in self._literal:
            return self._literal[token].encode()
        if self._backend is not None and self._decode is not None:
            # Models may have logits for more ids than their tokenizers have tokens.
            name = self._backend.id_to_token(token)
            return self._decode(name) if name is not None else b""
        if not 0 <= token < len(self._tokenizer):
            return b""
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text.encode()


def decoder_of(backend: Any) -> Decoder | None:
    """One token's name to its bytes, by the tokenizer's own decoder; None if that needs a token's neighbours."""
    if backend.decoder is None:
        return None
    # The one way to see what a decoder is; its classes show nothing.
    steps = list(_steps(json.loads(backend.decoder.__getstate__())))
    if any(step["type"] == "ByteLevel" for step in steps):
        return byte_level
    replacements = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            # These two join tokens, and change only where the whole text begins or ends.
            case {"type": "ByteFallback" | "Fuse" | "Strip"}:
                pass
            case _:
                return None
    return partial(replaced, replacements, any(step["type"] == "ByteFallback" for step in steps))


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def replaced(replacements: list[tuple[str, str]], fallback: bool, name: str) -> bytes:
    """A SentencePiece token's bytes; with ``fallback``, ``<0x0A>`` is a byte."""
    if fallback and len(name) == BYTE_TOKEN_LENGTH and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    for old, new in replacements:
        name = name.replace(old, new)
    return name.encode()


def byte_level(name: str) -> bytes:
    """A byte-level token's bytes."""
    # As the decoder does it: a name with a character that stands for no byte is meant literally.
    data = [BYTES.get(character) for character in name]
    known = [byte for byte in data if byte is not None]
    return bytes(known) if len(known) == len(data) else name.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others are moved up to U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(moved)}


BYTES = _byte_alphabet()
