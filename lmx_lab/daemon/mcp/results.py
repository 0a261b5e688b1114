"""Convert the results of MCP tools to text, for models that read only text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmx_lab.daemon.mcp.redaction import one_line
from lmx_lab.daemon.tools.tool import ToolResult

TEXT_CHARACTERS = 2**20
"""Maximum length of a result. The runner of the turn applies a lower limit."""


def tool_result(content: Sequence[Any], structured: Any, *, is_error: bool) -> ToolResult:
    """Convert a result to text: the text parts, and descriptions in place of images and other parts.

    Args:
        content: Parts of the result, which have a ``type`` as defined by MCP.
        structured: Structured part of the result. It comes first, as JSON, if there is no text part.
        is_error: Whether the tool reports an error.
    """
    text = _join(filter(None, map(_block_text, content)))
    if structured is not None and not any(block.type == "text" and block.text for block in content):
        text = _join([json.dumps(structured, ensure_ascii=False), *([text] if text else [])])
    if is_error:
        return ToolResult(status="error", text=text or "The tool failed without a message.")
    return ToolResult(status="ok", text=text or "(no result)")


def _join(texts: Iterator[str] | Sequence[str]) -> str:
    kept, size = [], 0
    for text in texts:
        kept.append(text[: TEXT_CHARACTERS - size])
        size += len(kept[-1]) + 1
        if size >= TEXT_CHARACTERS:
            break
    return "\n".join(kept)


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type} of type {one_line(block.mime_type)}, {_size(block.data)}; it cannot be shown here]"
        case "resource_link":
            return f"[link to the resource {one_line(block.uri)} {one_line(block.title or block.name)}]"
        case "resource":
            return _resource_text(block.resource)
        case other:
            return f"[content of type {one_line(str(other))}; it cannot be shown here]"


def _resource_text(resource: Any) -> str:
    if (text := getattr(resource, "text", None)) is not None:
        return f"[resource {one_line(resource.uri)}]\n{text}"
    kind = f" of type {one_line(resource.mime_type)}" if resource.mime_type else ""
    return f"[resource {one_line(resource.uri)}{kind}, {_size(resource.blob)}; it cannot be shown here]"


def _size(base64: str) -> str:
    return f"{len(base64) * 3 // 4:,} bytes"
