"""What a tool of an MCP server has answered, in words for a model that reads text only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmx_lab.daemon.mcp.lines import one_line
from lmx_lab.daemon.tools.tool import ToolResult

TEXT_CHARACTERS = 2**20
"""Of a result; what a model is told of it is cut further by whoever asked."""


def described(content: Sequence[Any], structured: Any, *, is_error: bool) -> ToolResult:
    """The text parts, and in their places words for what is no text; the structured part as JSON if there is no text.

    Args:
        content: Blocks with a ``type``, as MCP has them.
    """
    text = _joined(filter(None, map(_words, content)))
    if structured is not None and not any(block.type == "text" and block.text for block in content):
        text = _joined([json.dumps(structured, ensure_ascii=False), *([text] if text else [])])
    if is_error:
        return ToolResult(status="error", text=text or "The tool failed, and did not say why.")
    return ToolResult(status="ok", text=text or "(no result)")


def _joined(pieces: Iterator[str] | Sequence[str]) -> str:
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece[: TEXT_CHARACTERS - size])
        size += len(kept[-1]) + 1
        if size >= TEXT_CHARACTERS:
            break
    return "\n".join(kept)


def _words(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type} of type {one_line(block.mime_type)}, {_size(block.data)}; it cannot be shown here]"
        case "resource_link":
            return f"[link to the resource {one_line(block.uri)} {one_line(block.title or block.name)}]"
        case "resource":
            return _resource(block.resource)
        case other:
            return f"[a part of the type {one_line(str(other))}; it cannot be shown here]"


def _resource(resource: Any) -> str:
    if (text := getattr(resource, "text", None)) is not None:
        return f"[resource {one_line(resource.uri)}]\n{text}"
    kind = f" of type {one_line(resource.mime_type)}" if resource.mime_type else ""
    return f"[resource {one_line(resource.uri)}{kind}, {_size(resource.blob)}; it cannot be shown here]"


def _size(base64: str) -> str:
    return f"{len(base64) * 3 // 4:,} bytes"
