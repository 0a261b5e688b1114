"""Log one line when a request ends. ``lmx-lab serve`` prints these lines."""

from __future__ import annotations

import logging
from http import HTTPStatus

from lmx_lab.http.guard import Scope
from lmx_lab.server.inference import RequestEnd
from lmx_lab.values.outputs import GenerationReport

log = logging.getLogger(__name__)
READY_PATHS = ("/readyz", "/health")


class RequestLog:
    """Combines the end of each request with the ends of its generations.

    ``GET`` requests, such as those of panels, are logged only if they fail, and those of ``/readyz`` and ``/health``
    never: 503 is their answer while no model is loaded. The methods are called on the server's event loop.
    """

    def __init__(self) -> None:
        self._ends: dict[str, list[RequestEnd]] = {}
        """For each running request, the ends of its generations up to now."""

    def begin(self, scope: Scope) -> None:
        """Called at the start of a request."""
        if log.isEnabledFor(logging.INFO):
            self._ends[scope["lmx_lab.request_id"]] = []

    def observe(self, end: RequestEnd) -> None:
        """Called at the end of each generation, embedding and rerank."""
        if (ends := self._ends.get(end.event.request_id)) is not None:
            ends.append(end)

    def end(self, scope: Scope, status: int | None) -> None:
        """Called at the end of a request.

        Args:
            status: The HTTP status; None if the client disconnected before the response.
        """
        ends = self._ends.pop(scope["lmx_lab.request_id"], None)
        if ends is None:
            return
        is_read = scope.get("method") in ("GET", "HEAD", "OPTIONS")
        if not ends and is_read and (status is None or status < 400 or scope["path"] in READY_PATHS):
            return
        client = scope["client"][0] if scope.get("client") else "unknown client"
        route = f"{scope.get('method', 'WebSocket')} {scope['path'][:80]}"
        for text in [_describe_end(end, status) for end in ends] or [_describe_status(status)]:
            log.info("%s  %s  %s", client, route, text)


def _describe_end(end: RequestEnd, status: int | None) -> str:
    event = end.event
    if event.finish_reason == "error":
        return "  ".join(part for part in (event.model, _describe_status(status), event.code) if part)
    parts = [event.model, f"{event.prompt_tokens} tokens in"]
    if event.kind == "chat":
        parts[1] += f", {event.completion_tokens} out"
    if isinstance(end.report, GenerationReport):
        parts += [f"first token in {event.ttft_ms / 1e3:.2f} s", f"{event.tokens_per_second:.1f} tok/s"]
    elif end.report is not None:
        parts.append(f"{end.report.total_s:.2f} s")
    return "  ".join([*parts, event.finish_reason])


def _describe_status(status: int | None) -> str:
    if status is None:
        return "the client disconnected"
    return f"{status} {HTTPStatus(status).phrase}" if status in HTTPStatus._value2member_map_ else str(status)
