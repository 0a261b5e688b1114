"""Repeat valid requests of every kind after each batch of cases, and compare the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from websockets.asyncio.client import connect

from lmx_lab.wire.daemon import StateFile
from soak.fuzzing.corpus import MODEL, PAIR, chat

GOOD_S = 30.0
TURN_S = 25
Request = Callable[[], Awaitable[Any]]


class KnownAnswers:
    """Valid requests with known answers. Entering the context sends them; ``check()`` repeats and compares them."""

    def __init__(
        self, server_url: str, daemon: StateFile, *, model: str = MODEL, servers: frozenset[str] = frozenset()
    ) -> None:
        """
        Args:
            model: The loaded model.
            servers: Names of the MCP servers that ``delete_created`` keeps.
        """
        self._url = server_url
        self._servers = servers
        self._model = model
        self._server = httpx2.AsyncClient(base_url=server_url, timeout=GOOD_S, trust_env=False)
        authorization = {"authorization": f"Bearer {daemon.token}"}
        self._daemon = httpx2.AsyncClient(base_url=daemon.url, headers=authorization, timeout=GOOD_S, trust_env=False)
        self._requests: dict[str, Request] = {
            "load": self._load,
            "chat": self._chat,
            "completion": self._completion,
            "embedding": self._embed,
            "rerank": self._rerank,
            "socket": self._socket,
            "turn": self._turn,
        }
        self._expected: dict[str, Any] = {}
        self.slowest_s = 0.0
        self.requests = 0

    async def __aenter__(self) -> KnownAnswers:
        self._expected = {name: await request() for name, request in self._requests.items()}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.aclose()
        await self._daemon.aclose()

    async def check(self) -> list[str]:
        """Return a sentence for each valid request that is not answered as before."""
        wrong = []
        for name, request in self._requests.items():
            started = time.perf_counter()
            self.requests += 1
            try:
                answer = await request()
            except Exception as exc:
                wrong.append(f"a valid request fails ({name}): {type(exc).__name__}: {exc}")
                continue
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)
            if answer != self._expected[name]:
                wrong.append(f"a valid request has another answer ({name}): {answer}, not {self._expected[name]}")
        return wrong

    async def delete_created(self) -> list[str]:
        """Delete the sessions and MCP servers that the cases have created; return a sentence for each failure."""
        try:
            return await self._delete_all()
        except (httpx2.HTTPError, ValueError) as exc:
            return [f"created objects cannot be deleted: {type(exc).__name__}: {exc}"]

    async def _delete_all(self) -> list[str]:
        for archived in ("false", "true"):
            listed = await _body(self._daemon.get(f"/v3/sessions?limit=200&archived={archived}"))
            for session in listed["sessions"]:
                (await self._daemon.delete(f"/v3/sessions/{session['session_id']}")).raise_for_status()
        for server in await self._created_servers():
            (await self._daemon.delete(f"/v3/mcp/servers/{server}")).raise_for_status()
        left = await self._created_servers()
        return [f"deleted MCP servers still exist: {left}"] if left else []

    async def _created_servers(self) -> list[str]:
        servers = (await _body(self._daemon.get("/v3/mcp/servers")))["servers"]
        return [server["name"] for server in servers if server["name"] not in self._servers]

    # Requests

    async def _load(self) -> Any:
        answer = await _body(self._server.post("/admin/models/load", json={"model": self._model}))
        return answer["success"], answer["model"]

    async def _chat(self) -> Any:
        answer = await _body(
            self._server.post("/v1/chat/completions", json=chat(model=self._model, temperature=0, max_tokens=12))
        )
        return answer["choices"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]

    async def _completion(self) -> Any:
        body = {"model": self._model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        return (await _body(self._server.post("/v1/completions", json=body)))["choices"]

    async def _embed(self) -> Any:
        body = {"model": "default", "input": ["a cat sits", "the dog"]}
        return (await _body(self._server.post("/v1/embeddings", json=body)))["data"]

    async def _rerank(self) -> Any:
        body = {"model": "default", "query": "a cat", "documents": PAIR}
        return (await _body(self._server.post("/v1/rerank", json=body)))["results"]

    async def _socket(self) -> Any:
        address = self._url.replace("http", "ws", 1) + "/v1/chat/stream"
        async with asyncio.timeout(GOOD_S), connect(address, proxy=None) as socket:
            await socket.send(json.dumps(chat(model=self._model, temperature=0, max_tokens=12)))
            messages: list[Any] = []
            while not messages or "done" not in messages[-1]:
                messages.append(json.loads(await socket.recv()))
        return "".join(message["token"] for message in messages[:-1]), messages[-1]["stats"]["completion_tokens"]

    async def _turn(self) -> Any:
        """Run a turn, and return its text and its events in the log."""
        made = await _body(self._daemon.post("/v3/sessions", json={"tools": []}))
        address = f"/v3/sessions/{made['session_id']}"
        body = {"content": "hello", "overrides": {"temperature": 0, "max_tokens": 12}}
        turn = await _body(self._daemon.post(f"{address}/turns", json=body))
        done = await _body(self._daemon.get(f"{address}/turns/{turn['turn_id']}?wait={TURN_S}"))
        page = await _body(self._daemon.get(f"{address}/events?after=0&types=turn.queued,turn.done,turn.error"))
        (await self._daemon.delete(address)).raise_for_status()
        return done["status"], done["text"], [event["event"] for event in page["events"]]


async def _body(answer: Awaitable[httpx2.Response]) -> Any:
    """Return the body of an answer.

    Raises:
        ValueError: the status is an error.
    """
    response = await answer
    if response.status_code >= 400:
        raise ValueError(f"status {response.status_code}: {response.text[:300]}")
    return response.json()
