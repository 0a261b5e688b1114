"""Map token ids to their bytes and text.

Tokens do not have to end at the end of a character, so their bytes are known exactly but not always their text. The
chat-completions format reports both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lmx_lab.engine.tokenizing.encoder import flatten, step_of
from lmx_lab.values.outputs import token_text

Decoder = Callable[[str], bytes]
BYTE_TOKEN_LENGTH = len("<0x00>")


class Vocabulary:
    """The bytes and the text of token ids, computed at first use. Use it on one thread at a time.

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
            self._decode = build_decoder(self._backend)
            added = self._backend.get_added_tokens_decoder().items()
            self._literal = {int(id_): token.content for id_, token in added}
            self._special |= {int(id_) for id_, token in added if token.special}
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token within a text, including a leading space.

        Those of a special token are its name. Unknown ids have no bytes.
        """
        known = self._bytes.get(token)
        if known is not None:
            return known
        data = b""
        if token in self._literal:
            data = self._literal[token].encode()
        elif self._backend is not None and self._decode is not None:
            # A model may have logits for more ids than its tokenizer has tokens.
            name = self._backend.id_to_token(token)
            data = self._decode(name) if name is not None else b""
        elif 0 <= token < len(self._tokenizer):
            data = self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()
        self._bytes[token] = data
        return data

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of the text of an answer."""
        return token in self._special

    def text_of(self, token: int) -> str:
        """Return the bytes of a token as text, or as ``bytes:\\xe2\\x82`` if they are not whole characters."""
        return token_text(self.bytes_of(token))


def build_decoder(backend: Any) -> Decoder | None:
    """Return a function from a token's name to its bytes that does what the tokenizer's decoder does.

    None if the decoder needs the neighbours of a token.
    """
    if backend.decoder is None:
        return None
    steps = list(flatten(step_of(backend.decoder)))
    if any(step["type"] == "ByteLevel" for step in steps):
        return decode_byte_level
    replacements = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            # These join tokens, and change only the beginning or the end of the whole text.
            case {"type": "ByteFallback" | "Fuse" | "Strip"}:
                pass
            case _:
                return None
    return partial(replace_text, replacements, any(step["type"] == "ByteFallback" for step in steps))


def replace_text(replacements: list[tuple[str, str]], fallback: bool, name: str) -> bytes:
    """Return the bytes of a SentencePiece token. With ``fallback``, a name such as ``<0x0A>`` is a byte."""
    if fallback and len(name) == BYTE_TOKEN_LENGTH and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    for old, new in replacements:
        name = name.replace(old, new)
    return name.encode()


def decode_byte_level(name: str) -> bytes:
    """Return the bytes of a byte-level token."""
    # Like the decoder: a name that contains a character outside the byte alphabet is taken literally.
    data = [BYTES.get(character) for character in name]
    known = [byte for byte in data if byte is not None]
    return bytes(known) if len(known) == len(data) else name.encode()


_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""GPT-2's characters for the 256 bytes: printable ones are themselves, the others begin at U+0100."""
