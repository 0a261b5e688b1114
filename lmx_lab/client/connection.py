"""One server over HTTP: requests, whole answers and server-sent events, all bounded, every failure in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from lmx_lab.client.address import bearer, is_loopback, server_address
from lmx_lab.client.failures import CHECK, OURS, Answer, Refuse, in_plain_words, not_ours, refusal
from lmx_lab.client.limits import SHORT_BYTES
from lmx_lab.client.sse import EVENT_STREAM, EventDecoder, Remark
from lmx_lab.errors import LabError, UnreachableError

Shape = TypeVar("Shape", bound=BaseModel)
CONNECT_S = 5.0
QUICK_S = 30.0
"""For the whole of what computes nothing, and between two events, of which there is one a second."""
# The server keeps an idle connection for 30 s: it must not close one that is just being used again.
IDLE_S = 10.0
CONNECTIONS = 256


class Connection:
    """Requests to one server, on one loop, over connections that are kept for a while.

    Args:
        base_url: With or without a proxy's prefix, a slash or ``/v1`` at its end.
        api_key: It is shown nowhere.
        transport: In the place of the network.
        timeout_s: The longest silence while the server computes; None waits as long as the connection is there.
        kind: Of server that is expected, for the words of errors.
        refuse: What an answer that is no success means.

    Raises:
        InvalidRequestError: an address or a key that could never do.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        timeout_s: float | None = None,
        kind: str = OURS,
        refuse: Refuse = refusal,
    ) -> None:
        self.url = server_address(base_url)
        self.kind = kind
        self._refuse = refuse
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=bearer(api_key),
            transport=transport,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_S),
            # A proxy for the web cannot reach this machine's own server.
            trust_env=not is_loopback(self.url),
        )
        self._quick = httpx2.Timeout(QUICK_S, connect=CONNECT_S)

    async def aclose(self) -> None:
        """Close all connections, which ends what the server computes for them. Idempotent."""
        await self._http.aclose()

    # Whole answers

    async def get(self, path: str, *, limit: int = SHORT_BYTES) -> tuple[httpx2.Response, bytes]:
        """What a server knows without computing, of at most ``limit`` bytes, within ``QUICK_S``."""
        request = self._http.build_request("GET", path, timeout=self._quick)
        try:
            # Also of all bytes together: one that says a little all the time is never silent.
            async with asyncio.timeout(QUICK_S):
                return await self._fetch(request, limit)
        except TimeoutError as exc:
            raise UnreachableError(f"{self.url} has not answered whole within {QUICK_S:g} s; {CHECK}") from exc

    async def post(self, path: str, content: bytes, shape: type[Shape], *, limit: int = SHORT_BYTES) -> Shape:
        headers = {"content-type": "application/json"}
        response, text = await self._fetch(
            self._http.build_request("POST", path, content=content, headers=headers), limit
        )
        return self.whole(response, text, shape)

    async def _fetch(self, request: httpx2.Request, limit: int) -> tuple[httpx2.Response, bytes]:
        """An answer and its body, of which no more is read than it may have."""
        response = await self._send(request)
        try:
            return response, await self._body(response, limit)
        finally:
            await response.aclose()

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        with in_plain_words(self.url):
            return await self._http.send(request, stream=True)

    async def _body(self, response: httpx2.Response, limit: int) -> bytes:
        text = await self.beginning(response, limit if response.is_success else SHORT_BYTES)
        if response.is_success and len(text) > limit:
            raise UnreachableError(
                f"{self.url} answered with more than {limit} bytes, which no answer to this request can have; {CHECK}"
            )
        return text

    async def beginning(self, response: httpx2.Response, limit: int) -> bytes:
        """The body, or of a longer one a little more than the limit."""
        body = bytearray()
        with in_plain_words(self.url, begun=True):
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > limit:
                        break
        return bytes(body)

    def whole(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        if not response.is_success:
            raise self.refused(response, text)
        return self.read(response, text, shape)

    def read(self, response: httpx2.Response, text: bytes, shape: type[Shape]) -> Shape:
        try:
            return shape.model_validate_json(text)
        except ValidationError as exc:
            raise self.refused(response, text) from exc

    # Streams

    async def events(
        self, method: str, path: str, *, content: bytes = b"", whole_bytes: int | None = None, **options: Any
    ) -> AsyncGenerator[str | Remark, None]:
        """The events of a stream and its comments; closing this closes the connection.

        Args:
            whole_bytes: The length that a JSON document may have which comes in the stream's place, and is given as
                its only event. By default none may come.
        """
        headers = {"accept": EVENT_STREAM, **({"content-type": "application/json"} if content else {})}
        request = self._http.build_request(method, path, content=content, headers=headers, **options)
        response = await self._send(request)
        try:
            if whole_bytes is not None and response.is_success and _kind(response).endswith("json"):
                yield (await self._body(response, whole_bytes)).decode(errors="replace")
                return
            await self._check_stream(response)
            decoder = EventDecoder()
            with in_plain_words(self.url, begun=True):
                async for chunk in response.aiter_bytes():
                    for event in self._fed(decoder, chunk):
                        yield event
        finally:
            await response.aclose()

    async def _check_stream(self, response: httpx2.Response) -> None:
        if response.is_success and _kind(response) == EVENT_STREAM:
            return
        raise self.refused(response, await self.beginning(response, SHORT_BYTES))

    def _fed(self, decoder: EventDecoder, chunk: bytes) -> list[str | Remark]:
        try:
            return decoder.feed(chunk)
        except ValueError as exc:
            raise self.unreadable() from exc

    # Failures

    def refused(self, response: httpx2.Response, body: bytes) -> LabError:
        """The error of an answer that is no success, or not what was asked for."""
        return self._refuse(self.answer(response, body))

    def answer(self, response: httpx2.Response, body: bytes) -> Answer:
        headers: Mapping[str, str] = response.headers
        return Answer(
            url=self.url,
            status=response.status_code,
            kind=headers.get("content-type", ""),
            retry_after=headers.get("retry-after"),
            body=body,
            wanted=self.kind,
        )

    def unreadable(self) -> UnreachableError:
        """Of an event that is none of such a server."""
        return not_ours(
            Answer(url=self.url, status=200, kind=EVENT_STREAM, retry_after=None, body=b"", wanted=self.kind)
        )


def _kind(response: httpx2.Response) -> str:
    content_type: str = response.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()
