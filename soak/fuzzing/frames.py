"""Generate almost valid WebSockets: handshakes, frames and ends, as bytes (RFC 6455)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from soak.fuzzing.requests import HOST, Headers
from soak.fuzzing.values import changed_body, to_json

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
"""The example key of RFC 6455, section 1.3."""
MASK = b"\x5a\xa5\x0f\xf0"
LONG_HEAD = bytes([FIN | TEXT, 0xFF])
"""Head of a text frame whose length has eight bytes."""
TOO_LONG = 8 * 2**20 + 1
"""One byte more than the servers accept."""
# Without 1011, which would mean a bug if a server sent it; servers repeat the code of their client.
CLOSE_CODES = (0, 1, 999, 1000, 1001, 1003, 1004, 1005, 1006, 1012, 1015, 1016, 2999, 3000, 4999, 5000, 65535)


Ending = Literal["close", "shut", "reset", "wait"]
ENDS: tuple[Ending, ...] = ("close", "close", "close", "close", "shut", "reset")


@dataclass(frozen=True, kw_only=True)
class SocketCase:
    """A WebSocket, and what is known about it from its generation."""

    handshake: bytes
    frames: bytes
    valid: bool
    """Whether the handshake is valid, so that the server must accept it."""
    answered: bool
    """Whether an answer is required: a complete text message precedes anything that ends the connection."""
    frames_are_whole: bool = True
    """Whether all frames are complete. After an incomplete frame the server does not see a close frame, so the client
    must close the connection."""
    end: Ending
    """How the client ends the connection after a required answer. ``wait`` leaves that to the server."""
    closing: bytes = b""
    """Close frame that the client sends if ``end`` is ``close``; the server answers with the same code."""

    @property
    def upgrades(self) -> bool:
        """Whether the request asks for a WebSocket. Otherwise it is an ordinary GET, and may be answered as such."""
        lines = (b"\r\nupgrade: websocket\r\n", b"\r\nconnection: Upgrade\r\n", b"\r\nsec-websocket-key: ")
        return all(line in self.handshake for line in lines)


def frame(opcode: int, payload: bytes, *, fin: bool = True, reserved: int = 0, masked: bool = True) -> bytes:
    size = len(payload)
    first = (FIN if fin else 0) | reserved << 4 | opcode
    mask_bit = 0x80 if masked else 0
    if size < 126:
        head = bytes([first, mask_bit | size])
    elif size < 65536:
        head = bytes([first, mask_bit | 126]) + size.to_bytes(2)
    else:
        head = bytes([first, mask_bit | 127]) + size.to_bytes(8)
    return head + (MASK + _masked(payload) if masked else payload)


def _masked(payload: bytes) -> bytes:
    key = (MASK * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(len(payload))


HANDSHAKE: Headers = [
    ("host", HOST),
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-key", KEY),
    ("sec-websocket-version", "13"),
]
OTHER_HANDSHAKES = (
    *(("upgrade", "h2c"), ("upgrade", ""), ("connection", "close"), ("connection", ""), ("sec-websocket-key", "")),
    *(("sec-websocket-key", "x"), ("sec-websocket-key", "é"), ("sec-websocket-version", "8"), ("host", "evil")),
    *(("sec-websocket-version", "x"), ("sec-websocket-version", "9" * 5000), ("sec-websocket-extensions", ";;=")),
    *(("sec-websocket-extensions", "permessage-deflate; server_max_window_bits=99"), ("sec-websocket-protocol", ",")),
    *(("origin", "null"), ("origin", "http://evil.example"), ("x", "y" * 70_000), ("content-length", "5")),
    *(("transfer-encoding", "chunked"), ("sec-websocket-key", KEY * 2), ("authorization", "Bearer x"), ("x", "\0")),
)
HARMLESS = (("sec-websocket-extensions", "permessage-deflate"), ("sec-websocket-protocol", "chat"), ("cookie", "a=b"))


def handshake(target: str, headers: Headers) -> bytes:
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")


def drawn_handshake(chance: random.Random, target: str, more: Headers) -> tuple[bytes, bool]:
    """Return the bytes of a handshake, and whether it is valid."""
    headers = [*HANDSHAKE, *more]
    how = chance.randint(0, 24)
    if how == 0:
        name, value = chance.choice(OTHER_HANDSHAKES)
        return handshake(target, [*(pair for pair in headers if pair[0] != name), (name, value)]), False
    if how == 1:
        gone = chance.choice(headers)
        return handshake(target, [pair for pair in headers if pair != gone]), False
    if how == 2:
        headers.append(chance.choice(HARMLESS))
    return handshake(target, headers), True


def chat_socket(chance: random.Random, target: str, goods: Sequence[Any]) -> SocketCase:
    """Return a chat request as a message, with a changed body or changed frames."""
    opening, valid = drawn_handshake(chance, target, [])
    good = chance.choice(goods)
    body = changed_body(chance, good, goods) if chance.randint(0, 3) else good
    text = to_json(body, escaped=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    fits = len(text) < TOO_LONG
    whole = fits and _is_text(text)
    how, frames_are_whole = chance.randint(0, 11), True
    if how < 6:
        frames, answered = frame(TEXT, text), whole
    elif how == 6:
        frames, answered = _in_pieces(chance, text), whole
    elif how == 7:
        frames, answered = frame(BINARY, text), fits
    else:
        frames, answered, frames_are_whole = _wrong_frames(chance, text), False, False
    # A second message, or a control frame, does not change the answer to the first message.
    if how < 6 and not chance.randint(0, 3):
        frames += chance.choice((frame(PING, b"p" * 125), frame(PONG, b""), frame(TEXT, b"{}"), frame(BINARY, b"x")))
    return replace(
        _case(chance, opening, valid, frames, answered and valid, may_wait=True), frames_are_whole=frames_are_whole
    )


def event_socket(chance: random.Random, path: str, token: Headers, sessions: Sequence[str]) -> SocketCase:
    """Return a subscription with a changed query, key, or frames."""
    query = [_parameter(chance, sessions) for _ in range(chance.randint(0, 3))]
    more = token if chance.randint(0, 9) else []
    target = f"{path}{'?' if query else ''}{'&'.join(query)}"
    opening, valid = drawn_handshake(chance, target, more)
    plain = valid and not query and bool(more)
    kind = chance.randint(0, 9)
    if kind < 4:
        frames = b""
    elif kind < 7:
        count = chance.choice((1, 5, 63, 65, 200))
        frames = frame(chance.choice((TEXT, BINARY, PING)), b"{}") * count
    else:
        frames = _wrong_frames(chance, b'{"subscribe": "*"}')
    return replace(
        _case(chance, opening, plain, frames, plain and not frames, may_wait=False), frames_are_whole=kind < 7
    )


def _parameter(chance: random.Random, sessions: Sequence[str]) -> str:
    name = chance.choice(("after", "stream_id", "session_id", "types", "token", "limit", "", "After", "a%00"))
    values = (
        "0",
        "1",
        "5",
        "-1",
        "9" * 16,
        "9" * 17,
        " 1",
        "1_0",
        "turn.*",
        "turn.done,session.created",
        "stream.hello",
    )
    words = ("%00", "%ff", "%ed%a0%80", "", "*", "x" * 3000, "%22", "a,b,,", "turn.*" + ",turn.*" * 300, "\xe9")
    return f"{name}={chance.choice((*values, *words, *sessions))}"


def _in_pieces(chance: random.Random, text: bytes) -> bytes:
    """Split a message into several frames with control frames between them, which is valid."""
    cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(1, 5)))
    bounds = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    frames = b""
    for number, (start, end) in enumerate(bounds):
        opcode, fin = (CONTINUATION if number else TEXT), number == len(bounds) - 1
        frames += frame(opcode, text[start:end], fin=fin)
        if not fin and chance.random() < 0.5:
            frames += frame(PING, b"still there?")
    return frames


def _wrong_frames(chance: random.Random, text: bytes) -> bytes:
    """Return invalid or incomplete frames."""
    whole = frame(TEXT, text)
    bad_texts = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"{}\xf8")
    sizes = (TOO_LONG, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: frame(TEXT, text, fin=False),
        lambda: frame(CONTINUATION, text),
        lambda: frame(TEXT, text, fin=False) + whole,
        lambda: frame(TEXT, text, masked=False),
        lambda: frame(TEXT, text, reserved=chance.randint(1, 7)),
        lambda: frame(chance.choice((3, 4, 5, 6, 7, 11, 15)), text),
        lambda: frame(PING, text[:124], fin=False),
        lambda: frame(chance.choice((PING, CLOSE)), b"x" * 126),
        lambda: frame(TEXT, chance.choice(bad_texts)),
        lambda: frame(TEXT, b"\xc3", fin=False) + frame(CONTINUATION, b"\xa9{"),
        lambda: LONG_HEAD + chance.choice(sizes).to_bytes(8) + MASK + b"a" * 100,
        # A length that should have used fewer bytes.
        lambda: LONG_HEAD + len(text).to_bytes(8) + MASK + _masked(text),
        lambda: whole[: chance.randint(1, len(whole) - 1)],
        lambda: b"".join(frame(CONTINUATION if at else TEXT, b"", fin=False) for at in range(2000)),
        lambda: chance.randbytes(chance.randint(2, 60)),
    )
    return chance.choice(makers)()


def _case(
    chance: random.Random, opening: bytes, valid: bool, frames: bytes, answered: bool, *, may_wait: bool
) -> SocketCase:
    # Only rarely, because the server waits five seconds for a client that does not close.
    stays = may_wait and answered and not chance.randint(0, 29)
    end: Ending = "wait" if stays else chance.choice(ENDS)
    code = chance.choice(CLOSE_CODES).to_bytes(2)
    reason = chance.choice((b"", b"bye", b"\xff", b"r" * 123, b"r" * 124))
    payload = chance.choice((b"", b"\x03", code, (1000).to_bytes(2), code + reason))
    return SocketCase(
        handshake=opening, frames=frames, valid=valid, answered=answered, end=end, closing=frame(CLOSE, payload)
    )


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def oversized(target: str, more: Headers) -> SocketCase:
    """Return a complete message above the size limit."""
    return SocketCase(
        handshake=handshake(target, [*HANDSHAKE, *more]),
        frames=frame(TEXT, b'{"model": "' + b"a" * TOO_LONG + b'"}'),
        valid=True,
        answered=False,
        end="close",
        closing=frame(CLOSE, (1000).to_bytes(2)),
    )
