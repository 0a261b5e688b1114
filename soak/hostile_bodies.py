"""Define request bodies within the size limit that used to take seconds to refuse, and large valid bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

BODY_BYTES = 8_000_000
"""Just below the limit of a server."""
CHAT = "/v1/chat/completions"
SESSIONS = "/v3/sessions"
ASK = b'{"model":"default","max_tokens":1,'
HELLO = b'"messages":[{"role":"user","content":"a"}]'


@dataclass(frozen=True, kw_only=True)
class HostileBody:
    """A request whose body is slow to process."""

    name: str
    path: str
    make: Callable[[], bytes]
    method: str = "POST"
    refused: bool = True
    """Whether the body must be refused with 400 or 413; otherwise any status below 500, and 503, is allowed."""

    @cached_property
    def content(self) -> bytes:
        return self.make()


def repeated(before: bytes, piece: bytes, after: bytes, size: int = BODY_BYTES) -> bytes:
    """Repeat a piece until the body has about ``size`` bytes. ``%d`` in it is replaced by its number, in 7 digits."""
    length = len(piece.replace(b"%d", b"1234567"))
    count = (size - len(before) - len(after)) // (length + 1)
    pieces = (piece.replace(b"%d", b"%07d" % number) for number in range(count)) if b"%d" in piece else [piece] * count
    return before + b",".join(pieces) + after


def _content(piece: bytes, size: int = BODY_BYTES) -> bytes:
    return repeated(ASK + b'"messages":[{"role":"user","content":[', piece, b"]}]}", size)


def _field(name: bytes, piece: bytes, brackets: bytes = b"{}", size: int = BODY_BYTES) -> bytes:
    return repeated(ASK + HELLO + b',"' + name + b'":' + brackets[:1], piece, brackets[1:] + b"}", size)


def _text(piece: bytes, size: int = BODY_BYTES) -> bytes:
    return ASK + b'"messages":[{"role":"user","content":"' + piece * (size // len(piece)) + b'"}]}'


def _chat(name: str, make: Callable[[], bytes], *, refused: bool = True) -> HostileBody:
    return HostileBody(name=name, path=CHAT, make=make, refused=refused)


SCHEMA = b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"%s":%s'
TOOL = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{'
TOOL_CALLS = b'"messages":[{"role":"assistant","tool_calls":['


REPORTED = (
    _chat("content of 2.5 million {}", lambda: _content(b"{}", 7_500_000)),
    _chat("content of 400,000 {}", lambda: _content(b"{}", 1_200_000)),
    _chat("600,000 unknown members", lambda: repeated(ASK + HELLO + b",", b'"%d":1', b"}", 6_600_000)),
    _chat("unknown members, as many as may be", lambda: repeated(ASK + HELLO + b",", b'"%d":1', b"}", 1_190_000)),
    _chat("500,000 impossible template variables", lambda: _field(b"chat_template_kwargs", b'"%d":1', size=5_500_000)),
    _chat("600,000 impossible keys of logit_bias", lambda: _field(b"logit_bias", b'"a%d":1', size=7_200_000)),
    _chat("600,000 template variables", lambda: _field(b"chat_template_kwargs", b'"a%d":1', size=7_200_000)),
    _chat("300,000 text parts", lambda: _content(b'{"type":"text","text":""}', 7_800_000)),
)
"""The bodies that were measured first."""
CHATS = (
    *REPORTED,
    _chat("900,000 bytes of {} as content", lambda: _content(b"{}", 900_000)),
    _chat("messages of {}", lambda: repeated(ASK + b'"messages":[', b"{}", b"]}")),
    _chat("tool calls of {}", lambda: repeated(ASK + TOOL_CALLS, b"{}", b"]}]}")),
    _chat("metadata of many members", lambda: _field(b"metadata", b'"a%d":1')),
    _chat("a member a million times", lambda: repeated(ASK + HELLO + b",", b'"k":1', b"}")),
    _chat("a key of 8 MB", lambda: ASK + HELLO + b',"' + b"k" * BODY_BYTES + b'":1}'),
    _chat("lists 60 deep", lambda: _field(b"chat_template_kwargs", b'"a%d":' + b"[" * 58 + b"]" * 58)),
    _chat("lists 60 deep, as many as may be", lambda: _field(b"metadata", b"[" * 58 + b"]" * 58, b"[]", 95_000)),
    _chat("objects 60 deep", lambda: _field(b"metadata", b'"a%d":' + b'{"a":' * 58 + b"1" + b"}" * 58)),
    _chat("8 million [", lambda: b"[" * BODY_BYTES),
    _chat("8 million quotes", lambda: b'"' * BODY_BYTES),
    _chat("8 million backslashes", lambda: b'"' + b"\\" * BODY_BYTES + b'"'),
    _chat("8 million commas", lambda: b"[" + b"," * BODY_BYTES),
    _chat("8 million spaces", lambda: b" " * BODY_BYTES),
    _chat("8 million line ends, then a chat", lambda: b"\n" * BODY_BYTES + ASK + b'"messages":[]}'),
    _chat("numbers of 4,300 digits", lambda: _field(b"metadata", b"9" * 4300, b"[]")),
    _chat("a number of 8 million digits", lambda: ASK + HELLO + b',"seed":' + b"9" * BODY_BYTES + b"}"),
    _chat("1e400, after 300,000 numbers", lambda: _field(b"metadata", b"1,1,1", b"[]", 600_000)[:-2] + b",1e400]}"),
    _chat("stop of a million texts", lambda: _field(b"stop", b'"a"', b"[]")),
    _chat("modalities of a million texts", lambda: _field(b"modalities", b'"a"', b"[]")),
    _chat(
        "a tool of 100,000 parameters", lambda: repeated(ASK + HELLO + b"," + TOOL, b'"%d":{}', b"}}}}]}", 1_300_000)
    ),
    _chat(
        "a schema of 500,000 members",
        lambda: repeated(ASK + HELLO + b"," + SCHEMA % (b"properties", b"{"), b'"%d":{}', b"}}}}}", 6_500_000),
    ),
    _chat(
        "an enum of 500,000 values",
        lambda: repeated(ASK + HELLO + b"," + SCHEMA % (b"enum", b"["), b"1%d", b"]}}}}", 4_000_000),
    ),
    _chat("8 MB as a role", lambda: ASK + b'"messages":[{"role":"' + b"a" * BODY_BYTES + b'","content":"a"}]}'),
    _chat("4,096 messages", lambda: ASK + b'"messages":[' + b",".join([HELLO[12:-1]] * 4096) + b"]}", refused=False),
    _chat("4,096 text parts", lambda: _content(b'{"type":"text","text":""}', 4096 * 26), refused=False),
    _chat("a text of 8 MB", lambda: _text(b"word "), refused=False),
    _chat("a text of escapes", lambda: _text(b"\\u0041"), refused=False),
    _chat("a text of line ends", lambda: _text(b"\\n"), refused=False),
    _chat("a text of emojis", lambda: _text("\U0001f600".encode()), refused=False),
)
IDS = b'{"model":"default","input":['
DOCUMENTS = b'{"model":"default","query":"a","documents":['
OTHERS = (
    HostileBody(
        name="1.3 million token ids to embed", path="/v1/embeddings", make=lambda: repeated(IDS, b"12345", b"]}")
    ),
    HostileBody(name="a million {} to embed", path="/v1/embeddings", make=lambda: repeated(IDS, b"{}", b"]}")),
    HostileBody(
        name="400,000 token ids to embed",
        path="/v1/embeddings",
        make=lambda: repeated(IDS, b"12345", b"]}", 6 * 400_000),
        refused=False,
    ),
    HostileBody(
        name="16,384 lists of token ids to embed",
        path="/v1/embeddings",
        make=lambda: IDS + b",".join([b"[" + b",".join([b"12345"] * 23) + b"]"] * 16_384) + b"]}",
        refused=False,
    ),
    HostileBody(
        name="a prompt of 400,000 token ids",
        path="/v1/completions",
        make=lambda: repeated(b'{"model":"default","prompt":[', b"12345", b"]}", 6 * 400_000),
        refused=False,
    ),
    HostileBody(
        name="a million empty prompts", path="/v1/completions", make=lambda: repeated(b'{"prompt":[', b"[]", b"]}")
    ),
    HostileBody(name="2 million {} to rank", path="/v1/rerank", make=lambda: repeated(DOCUMENTS, b"{}", b"]}")),
    HostileBody(
        name="16,384 documents of six fields",
        path="/v1/rerank",
        make=lambda: (
            DOCUMENTS
            + b",".join([b'{"text":"a",' + b",".join(b'"%d":1' % at for at in range(5)) + b"}"] * 16_384)
            + b"]}"
        ),
        refused=False,
    ),
    HostileBody(
        name="a load with 600,000 unknown members",
        path="/admin/models/load",
        make=lambda: repeated(b"{", b'"%d":1', b"}"),
    ),
    HostileBody(name="an unload of a list", path="/admin/models/unload", make=lambda: repeated(b"[", b"{}", b"]")),
)
NO_SESSION = f"{SESSIONS}/none"
DAEMON = (
    HostileBody(name="messages of {}", path=SESSIONS, make=lambda: repeated(b'{"messages":[', b"{}", b"]}")),
    HostileBody(
        name="tool calls of {}",
        path=SESSIONS,
        make=lambda: repeated(b'{"messages":[{"role":"assistant","tool_calls":[', b"{}", b"]}]}", 400_000),
    ),
    HostileBody(
        name="128 calls in each of many messages",
        path=SESSIONS,
        make=lambda: repeated(
            b'{"messages":[', b'{"role":"user","tool_calls":[' + b",".join([b"{}"] * 128) + b"]}", b"]}", 400_000
        ),
    ),
    HostileBody(
        name="metadata of many members", path=SESSIONS, make=lambda: repeated(b'{"metadata":{', b'"a%d":1', b"}}")
    ),
    HostileBody(
        name="metadata 60 deep",
        path=SESSIONS,
        make=lambda: repeated(b'{"metadata":{"a":[', b"[" * 58 + b"]" * 58, b"]}}", 95_000),
    ),
    HostileBody(
        name="tools of a million names", path=SESSIONS, make=lambda: repeated(b'{"tools":[', b"1", b"]}", 600_000)
    ),
    HostileBody(name="600,000 unknown members", path=SESSIONS, make=lambda: repeated(b"{", b'"%d":1', b"}")),
    HostileBody(
        name="a change with unknown members",
        path=NO_SESSION,
        method="PATCH",
        make=lambda: repeated(b"{", b'"%d":1', b"}"),
    ),
    HostileBody(name="a fork of a list", path=f"{NO_SESSION}/fork", make=lambda: repeated(b"[", b"{}", b"]")),
    HostileBody(
        name="a turn with extra fields",
        path=f"{NO_SESSION}/turns",
        make=lambda: repeated(b'{"content":"a","overrides":{"extra":{', b'"a%d":1', b"}}}"),
    ),
    HostileBody(
        name="a cancel with unknown members",
        path=f"{NO_SESSION}/cancel",
        make=lambda: repeated(b"{", b'"%d":1', b"}", 400_000),
    ),
    HostileBody(
        name="a decision with unknown members",
        path="/v3/permissions/none",
        make=lambda: repeated(b"{", b'"%d":1', b"}", 400_000),
    ),
    HostileBody(
        name="env of numbers",
        path="/v3/mcp/servers",
        make=lambda: repeated(b'{"name":"a","command":"a","env":{', b'"%d":1', b"}}", 400_000),
    ),
    HostileBody(
        name="headers of numbers",
        path="/v3/mcp/test",
        make=lambda: repeated(b'{"name":"a","transport":"http","url":"a","headers":{', b'"%d":1', b"}}"),
    ),
    HostileBody(
        name="a change of arguments",
        path="/v3/mcp/servers/none",
        method="PATCH",
        make=lambda: repeated(b'{"args":[', b"1", b"]}", 600_000),
    ),
    HostileBody(
        name="a restart with a body",
        path="/v3/mcp/servers/none/restart",
        make=lambda: repeated(b"[", b"{}", b"]"),
    ),
    HostileBody(
        name="a shutdown with unknown members", path="/v3/daemon/shutdown", make=lambda: repeated(b"{", b'"%d":1', b"}")
    ),
    HostileBody(
        name="4,096 messages",
        path=SESSIONS,
        make=lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 4096) + b"]}",
        refused=False,
    ),
    HostileBody(
        name="a turn of a million characters",
        path=f"{NO_SESSION}/turns",
        make=lambda: b'{"content":"' + b"a" * 1_000_000 + b'"}',
        refused=False,
    ),
)


TOO_LONG = HostileBody(name="more bytes than are read", path="/", make=lambda: b" " * (8 * 2**20 + 1))


def selection(bodies: tuple[HostileBody, ...]) -> tuple[HostileBody, ...]:
    """Return every eighth body, for a quick run."""
    return bodies[::8]
