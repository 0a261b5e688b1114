"""Generate almost valid WebSockets: handshakes, frames and ends, as bytes (RFC 6455)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from soak.fuzzing.requests import HOST, Headers
from soak.fuzzing.values import changed_bodies, to_json

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


@st.composite
def handshakes(draw: DrawFn, target: str, more: Headers) -> tuple[bytes, bool]:
    """Return the bytes of a handshake, and whether it is valid."""
    headers = [*HANDSHAKE, *more]
    how = draw(st.integers(0, 24))
    if how == 0:
        name, value = draw(st.sampled_from(OTHER_HANDSHAKES))
        return handshake(target, [*(pair for pair in headers if pair[0] != name), (name, value)]), False
    if how == 1:
        gone = draw(st.sampled_from(headers))
        return handshake(target, [pair for pair in headers if pair != gone]), False
    if how == 2:
        headers.append(draw(st.sampled_from(HARMLESS)))
    return handshake(target, headers), True


@st.composite
def chat_sockets(draw: DrawFn, target: str, goods: Sequence[Any]) -> SocketCase:
    """Return a chat request as a message, with a changed body or changed frames."""
    opening, valid = draw(handshakes(target, []))
    good = draw(st.sampled_from(goods))
    body = draw(changed_bodies(good, goods)) if draw(st.integers(0, 3)) else good
    text = to_json(body, escaped=draw(st.booleans())).encode("utf-8", "surrogatepass")
    fits = len(text) < TOO_LONG
    whole = fits and _is_text(text)
    how, frames_are_whole = draw(st.integers(0, 11)), True
    if how < 6:
        frames, answered = frame(TEXT, text), whole
    elif how == 6:
        frames, answered = draw(_in_pieces(text)), whole
    elif how == 7:
        frames, answered = frame(BINARY, text), fits
    else:
        frames, answered, frames_are_whole = draw(_wrong_frames(text)), False, False
    # A second message, or a control frame, does not change the answer to the first message.
    if how < 6 and not draw(st.integers(0, 3)):
        frames += draw(
            st.sampled_from((frame(PING, b"p" * 125), frame(PONG, b""), frame(TEXT, b"{}"), frame(BINARY, b"x")))
        )
    return replace(
        draw(_case(opening, valid, frames, answered and valid, may_wait=True)), frames_are_whole=frames_are_whole
    )


@st.composite
def event_sockets(draw: DrawFn, path: str, token: Headers, sessions: Sequence[str]) -> SocketCase:
    """Return a subscription with a changed query, key, or frames."""
    query = draw(st.lists(_parameters(sessions), max_size=3))
    more = token if draw(st.integers(0, 9)) else []
    target = f"{path}{'?' if query else ''}{'&'.join(query)}"
    opening, valid = draw(handshakes(target, more))
    plain = valid and not query and bool(more)
    kind = draw(st.integers(0, 9))
    if kind < 4:
        frames = b""
    elif kind < 7:
        count = draw(st.sampled_from((1, 5, 63, 65, 200)))
        frames = frame(draw(st.sampled_from((TEXT, BINARY, PING))), b"{}") * count
    else:
        frames = draw(_wrong_frames(b'{"subscribe": "*"}'))
    return replace(draw(_case(opening, plain, frames, plain and not frames, may_wait=False)), frames_are_whole=kind < 7)


@st.composite
def _parameters(draw: DrawFn, sessions: Sequence[str]) -> str:
    name = draw(st.sampled_from(("after", "stream_id", "session_id", "types", "token", "limit", "", "After", "a%00")))
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
    return f"{name}={draw(st.sampled_from((*values, *words, *sessions)))}"


@st.composite
def _in_pieces(draw: DrawFn, text: bytes) -> bytes:
    """Split a message into several frames with control frames between them, which is valid."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=5)))
    bounds = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    frames = b""
    for number, (start, end) in enumerate(bounds):
        opcode, fin = (CONTINUATION if number else TEXT), number == len(bounds) - 1
        frames += frame(opcode, text[start:end], fin=fin)
        if not fin and draw(st.booleans()):
            frames += frame(PING, b"still there?")
    return frames


def _wrong_frames(text: bytes) -> SearchStrategy[bytes]:
    """Return a strategy for invalid and incomplete frames."""
    whole = frame(TEXT, text)
    bad_texts = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"{}\xf8")
    sizes = (TOO_LONG, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    return st.one_of(
        st.just(frame(TEXT, text, fin=False)),
        st.just(frame(CONTINUATION, text)),
        st.just(frame(TEXT, text, fin=False) + whole),
        st.just(frame(TEXT, text, masked=False)),
        st.integers(1, 7).map(lambda bits: frame(TEXT, text, reserved=bits)),
        st.sampled_from((3, 4, 5, 6, 7, 11, 15)).map(lambda opcode: frame(opcode, text)),
        st.just(frame(PING, text[:124], fin=False)),
        st.sampled_from((PING, CLOSE)).map(lambda opcode: frame(opcode, b"x" * 126)),
        st.sampled_from(bad_texts).map(lambda bad: frame(TEXT, bad)),
        st.just(frame(TEXT, b"\xc3", fin=False) + frame(CONTINUATION, b"\xa9{")),
        st.sampled_from(sizes).map(lambda size: LONG_HEAD + size.to_bytes(8) + MASK + b"a" * 100),
        # A length that should have used fewer bytes.
        st.just(LONG_HEAD + len(text).to_bytes(8) + MASK + _masked(text)),
        st.integers(1, len(whole) - 1).map(lambda size: whole[:size]),
        st.just(b"".join(frame(CONTINUATION if at else TEXT, b"", fin=False) for at in range(2000))),
        st.binary(min_size=2, max_size=60),
    )


@st.composite
def _case(draw: DrawFn, opening: bytes, valid: bool, frames: bytes, answered: bool, *, may_wait: bool) -> SocketCase:
    # Only rarely, because the server waits five seconds for a client that does not close.
    stays = may_wait and answered and not draw(st.integers(0, 29))
    end: Ending = "wait" if stays else draw(st.sampled_from(ENDS))
    code = draw(st.sampled_from(CLOSE_CODES)).to_bytes(2)
    reason = draw(st.sampled_from((b"", b"bye", b"\xff", b"r" * 123, b"r" * 124)))
    payload = draw(st.sampled_from((b"", b"\x03", code, (1000).to_bytes(2), code + reason)))
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
