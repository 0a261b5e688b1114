"""Read the answers of scripted chat-format servers."""

from __future__ import annotations

from typing import Any

from lmx_lab.client.chat_chunks import CompleteToolCall, Piece, TokenUsage, ToolCallAssembler
from lmx_lab.client.chat_format import ChatFormatClient
from tests.daemon.scripted import Script, Scripted

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def pieces(url: str, **body: Any) -> list[Piece]:
    async with ChatFormatClient(url) as client:
        return [piece async for piece in client.stream({**BODY, **body})]


async def read(script: Script) -> tuple[str, str, tuple[CompleteToolCall, ...], str | None, TokenUsage | None]:
    """Return text, thoughts, tool calls, finish reason and usage of an answer."""
    assembler = ToolCallAssembler()
    with Scripted(script) as upstream:
        found = await pieces(upstream.url)
    for piece in found:
        for call in piece.calls:
            assembler.add(call)
    reasons = [piece.finish_reason for piece in found if piece.finish_reason]
    usages = [piece.usage for piece in found if piece.usage]
    return (
        "".join(piece.text for piece in found),
        "".join(piece.thinking for piece in found),
        assembler.calls(),
        reasons[-1] if reasons else None,
        usages[-1] if usages else None,
    )
