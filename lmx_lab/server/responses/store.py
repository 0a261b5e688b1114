"""Keep responses in memory for ``previous_response_id`` and GET, and run responses in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lmx_lab.errors import ConflictError, InvalidRequestError, NotFoundError
from lmx_lab.wire.responses import ResponseStatus

RESPONSES_LIMIT = 1000
BYTES_LIMIT = 64 * 2**20
"""Size of all stored responses, with their conversations, as JSON."""
KEPT = (
    f"the {RESPONSES_LIMIT:,} most recently used responses are kept, up to {BYTES_LIMIT >> 20} MiB, unless they were "
    "created with store: false"
)


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response and the conversation that it belongs to."""

    id: str
    status: ResponseStatus
    body: bytes
    """The response as JSON."""
    conversation: bytes
    """All items before the response, as JSON."""
    background: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.conversation)


class ResponseStore:
    """Stored responses. The least recently used ones are removed when there are too many."""

    def __init__(self, *, responses: int = RESPONSES_LIMIT, size_bytes: int = BYTES_LIMIT) -> None:
        self._limit = responses
        self._limit_bytes = size_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size_bytes = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks of responses in the background. There are no more than the engine accepts requests."""

    def put(self, response: StoredResponse) -> None:
        """Store a response, or replace the stored one with the same id. One that exceeds the limit is not stored."""
        self._remove(response.id)
        if response.size_bytes > self._limit_bytes:
            return
        self._responses[response.id] = response
        self._size_bytes += response.size_bytes
        while len(self._responses) > self._limit or self._size_bytes > self._limit_bytes:
            self._remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            NotFoundError: it is not stored.
        """
        if response_id not in self._responses:
            raise NotFoundError(f"no stored response has the id {response_id[:80]!r:.80}; {KEPT}")
        self._responses.move_to_end(response_id)
        return self._responses[response_id]

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def previous(self, previous_response_id: str) -> StoredResponse:
        """Return the response that a request continues.

        Raises:
            InvalidRequestError: the previous response is not stored, or not finished.
        """
        name = "previous_response_id"
        try:
            previous = self.get(previous_response_id)
        except NotFoundError as exc:
            raise InvalidRequestError(
                f"{name}: {exc.message}; send the whole conversation as input", param=name
            ) from exc
        if previous.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"{name}: the response {previous.id} is {previous.status}, and only completed and incomplete responses "
                "can be continued; wait until it is completed, or send the whole conversation as input",
                param=name,
            )
        return previous

    def delete(self, response_id: str) -> None:
        """Remove a response, and cancel it if it is generated in the background.

        Raises:
            NotFoundError: it is not stored.
        """
        self.get(response_id)
        self._remove(response_id)
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    def _remove(self, response_id: str) -> None:
        if (removed := self._responses.pop(response_id, None)) is not None:
            self._size_bytes -= removed.size_bytes

    # Responses in the background

    def start(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Generate a response in a separate task."""
        task = asyncio.get_running_loop().create_task(work, name=f"response {response_id}")
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    async def cancel(self, response_id: str) -> StoredResponse:
        """Cancel a response in the background, wait for its end, and return it. One that has ended is not changed.

        Raises:
            NotFoundError: it is not stored.
            ConflictError: it was not requested with ``background``.
        """
        response = self.get(response_id)
        if not response.background:
            raise ConflictError(
                f"the response {response.id} is not generated in the background; only responses with background: true "
                "can be cancelled, others by closing their connection"
            )
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
            await asyncio.wait({task})
        return self.get(response_id)

    @asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        """Cancel the responses in the background when the server stops."""
        yield
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
