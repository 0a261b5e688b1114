"""Define the tokens of the echo engine: pieces of words of up to three letters, and single bytes for everything else.

The vocabulary is computed, so token ids never change and no tokenizer file is needed. Any text can be encoded, and
decoding its tokens gives the same text.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
import sys
from collections.abc import Iterable, Sequence

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.values.generation import token_text

SPECIAL = ("<|begin|>", "<|message|>", "<|end|>")
BEGIN, MESSAGE, END = range(3)
"""Token ids: the beginning of a prompt; the beginning of a message, which its role follows; the end of a message and of
every answer."""
FIRST_BYTE = 16
"""Id of byte 0. The ids between the special tokens and this one are unused."""
FIRST_PIECE = FIRST_BYTE + 256
LONGEST_PIECE = 4
"""Largest number of bytes, and so of characters, in a token."""
PIECE = re.compile(rb" ?[a-z]{1,3}|[\x00-\xff]")


def _pieces() -> Iterable[bytes]:
    """Yield everything that the first alternative of ``PIECE`` matches."""
    for space in ("", " "):
        for length in (1, 2, 3):
            for letters in itertools.product(string.ascii_lowercase, repeat=length):
                if space or length > 1:
                    yield (space + "".join(letters)).encode()


class EchoVocabulary:
    """Token ids from 0 to ``size - 1``, and their bytes."""

    def __init__(self) -> None:
        unused = [b""] * (FIRST_BYTE - len(SPECIAL))
        self.bytes: list[bytes] = [*(name.encode() for name in SPECIAL), *unused]
        self.bytes += [bytes([byte]) for byte in range(256)]
        self.bytes += _pieces()
        self._ids = {data: id_ for id_, data in enumerate(self.bytes) if id_ >= FIRST_BYTE}

    @property
    def size(self) -> int:
        return len(self.bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the tables of tokens."""
        return sum(map(sys.getsizeof, self.bytes)) + sys.getsizeof(self.bytes) + sys.getsizeof(self._ids)

    @functools.cached_property
    def token_table(self) -> TokenTable:
        """The vocabulary for llguidance."""
        return TokenTable(self.bytes, list(range(FIRST_BYTE)), [END])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; names of special tokens in it are ordinary text."""
        ids = self._ids
        return [ids[piece] for piece in PIECE.findall(text.encode())]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens without special ones. Incomplete characters become U+FFFD."""
        known = self.bytes
        return b"".join([known[token] for token in tokens if token >= FIRST_BYTE]).decode(errors="replace")

    def show(self, tokens: Sequence[int]) -> str:
        """Do the same as ``decode``, but with the names of special tokens."""
        return b"".join([self.bytes[token] for token in tokens]).decode(errors="replace")

    def text_of(self, token: int) -> str:
        """Return one token as text, or as ``bytes:\\xe2`` if it is a part of a character."""
        return token_text(self.bytes[token])


@functools.cache
def echo_vocabulary() -> EchoVocabulary:
    """Return the only vocabulary of the process. It takes 20 ms to create and is never changed."""
    return EchoVocabulary()
