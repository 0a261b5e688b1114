"""Define the attacks of one client: what is sent, which answers are allowed, and until when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak.hostile.models import CONFIGS, LARGE, LOOP_WORD, NORMALIZER, PIECES, TEMPLATES, VALID
from soak.hostile.senders import (
    CHAT,
    DISCONNECTED,
    EMPTY_CONTINUATIONS,
    LEFT,
    PINGS,
    STILL_OPEN,
    Send,
    chat_of,
    post,
    unread_sockets,
    unread_streams,
)

LOAD = "/admin/models/load"
REFUSED = frozenset({"400 invalid-request"})
TOO_LONG = frozenset({"400 context_length_exceeded", "400 invalid-request"})
BUSY = frozenset({"429 queue-full", "409 model-busy"})
"""Answers that are also allowed if other requests wait, or if all attacks run at once."""
CLOSED = frozenset({"closed 1008", "closed 1013", "closed 1009", "closed 1002"})
ANSWER_S = 5.0
TEMPLATE_S = 7.0
"""Time limit of a template, plus one second for the start of its process and one for the answer."""
TOKENIZER_S = 7.0
"""Time limit of a text (4 s), plus time for the start of its process and for the answer."""
GRAMMAR_S = 10.0 + 2.0
"""A grammar waits up to 10 s for others, and its own time limit is 2 s."""
UNREAD_S = 45.0
"""Time for which a client reads nothing: the time limit of a slow client (10 s) plus the time to fill the buffers.
While the other client sends one chat after the other, its answers are paused, so the buffers may not be full then."""
UNREAD_TOKENS = 8000
AMBIGUOUS = 'start: s\ns: s s | s s s | /[a-z]+/ | " "'


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Requests with which one client attacks a server."""

    name: str
    send: Send
    answers: frozenset[str]
    """Allowed answers, and allowed ends of connections."""
    limit_s: float = ANSWER_S
    """Time limit for the last answer."""
    model: str = VALID
    """Name of the model that is loaded before the attack."""
    in_quick: bool = False
    """Whether a quick run includes the attack."""


ATTACKS = (
    Attack(
        name="a prompt of 5 MB of spaces",
        send=post(CHAT, lambda: chat_of(" " * 5_000_000)),
        answers=TOO_LONG,
        in_quick=True,
    ),
    Attack(
        name="8 prompts of 5 MB of spaces",
        send=post(CHAT, lambda: chat_of(" " * 5_000_000), clients=8),
        answers=TOO_LONG | BUSY,
    ),
    Attack(
        name="6 prompts of 8 MB whose senders leave",
        send=post(CHAT, lambda: chat_of("word " * 1_600_000), clients=6, leaves=True),
        answers=TOO_LONG | BUSY | {LEFT},
    ),
    Attack(
        name="40 bodies of nested lists of 64 KB",
        send=post(CHAT, lambda: chat_of("hello", metadata=[nested_list(58)] * 550), clients=40),
        answers=REFUSED | BUSY,
    ),
    Attack(
        name="8 texts of 5 MB to embed",
        send=post("/v1/embeddings", lambda: {"model": "default", "input": "word " * 1_000_000}, clients=8),
        answers=TOO_LONG | BUSY,
    ),
    Attack(
        name="8 documents of 5 MB to rank",
        send=post(
            "/v1/rerank",
            lambda: {"model": "default", "query": "word", "documents": ["word " * 1_000_000]},
            clients=8,
        ),
        answers=TOO_LONG | BUSY,
    ),
    Attack(
        name="a slow normalizer",
        send=post(CHAT, lambda: chat_of(("a" * 17 + "d") * 20_000 + "c")),
        answers=TOO_LONG | BUSY,
        limit_s=TOKENIZER_S,
        model=NORMALIZER,
    ),
    Attack(
        name="a slow pre-tokenizer",
        send=post(CHAT, lambda: chat_of("a" * 20_000)),
        answers=TOO_LONG | BUSY,
        limit_s=TOKENIZER_S,
        model=PIECES,
    ),
    Attack(
        name="a template that loops for one request",
        send=post(CHAT, lambda: chat_of(LOOP_WORD)),
        answers=REFUSED | {"503 internal-error", "503 no-model-loaded", "500 internal-error"},
        limit_s=TEMPLATE_S,
        model=NORMALIZER,
    ),
    Attack(
        name="8 WebSockets that are never read",
        send=unread_sockets(chat_of("hello", max_tokens=UNREAD_TOKENS, ignore_eos=True), clients=8, limit_s=UNREAD_S),
        answers=frozenset({DISCONNECTED, STILL_OPEN}),
        limit_s=UNREAD_S + 2,
    ),
    Attack(
        name="8 event streams that are never read",
        send=unread_streams(
            chat_of("hello", max_tokens=UNREAD_TOKENS, ignore_eos=True, stream=True), clients=8, limit_s=UNREAD_S
        ),
        answers=frozenset({DISCONNECTED, STILL_OPEN}),
        limit_s=UNREAD_S + 2,
    ),
    Attack(name="empty continuation frames", send=EMPTY_CONTINUATIONS, answers=CLOSED, in_quick=True),
    Attack(name="empty pings", send=PINGS, answers=CLOSED, in_quick=True),
    Attack(
        name="an ambiguous grammar",
        send=post(CHAT, lambda: chat_of("hello", response_format={"type": "grammar", "grammar": AMBIGUOUS})),
        answers=REFUSED,
    ),
    Attack(
        name="8 ambiguous grammars",
        send=post(CHAT, lambda: chat_of("hello", response_format={"type": "grammar", "grammar": AMBIGUOUS}), clients=8),
        answers=REFUSED | BUSY,
        limit_s=GRAMMAR_S,
    ),
    Attack(
        name="8 regular expressions of 30,000 options",
        send=post(CHAT, lambda: chat_of("hello", response_format={"type": "regex", "regex": "a?" * 30_000}), clients=8),
        answers=REFUSED | BUSY,
        limit_s=GRAMMAR_S,
    ),
)


def nested_list(depth: int) -> list[Any]:
    """Return lists within lists."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def loads(models: Mapping[str, Path]) -> list[Attack]:
    """Return an attack for each model that must be refused, and one of several loads at once."""
    refused = [name for name in models if name.removesuffix(", GGUF") in {*CONFIGS, *TEMPLATES}]
    attacks = [
        Attack(
            name=f"a load: {name}",
            send=_load(models[name]),
            answers=REFUSED,
            limit_s=TEMPLATE_S,
            in_quick=name == refused[0],
        )
        for name in refused
    ]
    if LARGE in models:
        send = post(LOAD, lambda: {"model": str(models[LARGE])}, clients=8)
        attacks.append(Attack(name=f"8 loads of {LARGE}", send=send, answers=REFUSED | BUSY, limit_s=TEMPLATE_S))
    return attacks


def _load(path: Path) -> Send:
    return post(LOAD, lambda: {"model": str(path)})
