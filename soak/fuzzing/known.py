"""Good requests of every kind whose answers are known: asked again after each batch of others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from websockets.asyncio.client import connect

from lmx_lab.wire.daemon import StateFile
from soak.fuzzing.corpus import PAIR, chat

GOOD_S = 30.0
TURN_S = 25
Ask = Callable[[], Awaitable[Any]]


class Known:
    """As a context: ``learn()`` asks once, and ``check()`` asks again and compares."""

    def __init__(self, server_url: str, daemon: StateFile, *, servers: frozenset[str] = frozenset()) -> None:
        """
        Args:
            servers: Names of MCP servers that stay.
        """
        self._url = server_url
        self._servers = servers
        self._server = httpx2.AsyncClient(base_url=server_url, timeout=GOOD_S, trust_env=False)
        authorization = {"authorization": f"Bearer {daemon.token}"}
        self._daemon = httpx2.AsyncClient(base_url=daemon.url, headers=authorization, timeout=GOOD_S, trust_env=False)
        self._asks: dict[str, Ask] = {
            "load": self._loaded,
            "chat": self._chat,
            "completion": self._completion,
            "embedding": self._embedding,
            "rerank": self._ranking,
            "socket": self._socket,
            "turn": self._turn,
        }
        self._expected: dict[str, Any] = {}
        self.slowest_s = 0.0
        self.asked = 0

    async def __aenter__(self) -> Known:
        self._expected = {name: await ask() for name, ask in self._asks.items()}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.aclose()
        await self._daemon.aclose()

    async def check(self) -> list[str]:
        """A sentence for each good request that is not answered as before."""
        wrong = []
        for name, ask in self._asks.items():
            started = time.perf_counter()
            self.asked += 1
            try:
                answer = await ask()
            except Exception as exc:
                wrong.append(f"a good request fails ({name}): {type(exc).__name__}: {exc}")
                continue
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)
            if answer != self._expected[name]:
                wrong.append(f"a good request is answered otherwise ({name}): {answer}, and not {self._expected[name]}")
        return wrong

    async def tidy(self) -> list[str]:
        """Removes what others have made in the daemon; a sentence for what does not go."""
        try:
            return await self._tidied()
        except (httpx2.HTTPError, ValueError) as exc:
            return [f"what was made cannot be removed: {type(exc).__name__}: {exc}"]

    async def _tidied(self) -> list[str]:
        for archived in ("false", "true"):
            listed = await _body(self._daemon.get(f"/v3/sessions?limit=200&archived={archived}"))
            for session in listed["sessions"]:
                (await self._daemon.delete(f"/v3/sessions/{session['session_id']}")).raise_for_status()
        for server in await self._others():
            (await self._daemon.delete(f"/v3/mcp/servers/{server}")).raise_for_status()
        left = await self._others()
        return [f"MCP servers that were removed are still there: {left}"] if left else []

    async def _others(self) -> list[str]:
        servers = (await _body(self._daemon.get("/v3/mcp/servers")))["servers"]
        return [server["name"] for server in servers if server["name"] not in self._servers]

    async def reload(self) -> None:
        """Puts another model in the place of the loaded one, and that back again."""
        for model in ("tiny-two", "tiny"):
            await _body(self._server.post("/admin/models/load", json={"model": model}))

    # What is asked

    async def _loaded(self) -> Any:
        answer = await _body(self._server.post("/admin/models/load", json={"model": "tiny"}))
        return answer["success"], answer["model"]

    async def _chat(self) -> Any:
        answer = await _body(self._server.post("/v1/chat/completions", json=chat(temperature=0, max_tokens=12)))
        return answer["choices"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]

    async def _completion(self) -> Any:
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        return (await _body(self._server.post("/v1/completions", json=body)))["choices"]

    async def _embedding(self) -> Any:
        body = {"model": "default", "input": ["a cat sits", "the dog"]}
        return (await _body(self._server.post("/v1/embeddings", json=body)))["data"]

    async def _ranking(self) -> Any:
        body = {"model": "default", "query": "a cat", "documents": PAIR}
        return (await _body(self._server.post("/v1/rerank", json=body)))["results"]

    async def _socket(self) -> Any:
        address = self._url.replace("http", "ws", 1) + "/v1/chat/stream"
        async with asyncio.timeout(GOOD_S), connect(address, proxy=None) as socket:
            await socket.send(json.dumps(chat(temperature=0, max_tokens=12)))
            messages: list[Any] = []
            while not messages or "done" not in messages[-1]:
                messages.append(json.loads(await socket.recv()))
        return "".join(message["token"] for message in messages[:-1]), messages[-1]["stats"]["completion_tokens"]

    async def _turn(self) -> Any:
        """A turn, and what the log has of it: begun once, ended once."""
        made = await _body(self._daemon.post("/v3/sessions", json={"tools": []}))
        address = f"/v3/sessions/{made['session_id']}"
        body = {"content": "hello", "overrides": {"temperature": 0, "max_tokens": 12}}
        turn = await _body(self._daemon.post(f"{address}/turns", json=body))
        done = await _body(self._daemon.get(f"{address}/turns/{turn['turn_id']}?wait={TURN_S}"))
        page = await _body(self._daemon.get(f"{address}/events?after=0&types=turn.queued,turn.done,turn.error"))
        (await self._daemon.delete(address)).raise_for_status()
        return done["status"], done["text"], [event["event"] for event in page["events"]]


async def _body(answer: Awaitable[httpx2.Response]) -> Any:
    """The body of an answer that has to be good."""
    response = await answer
    if response.status_code >= 400:
        raise ValueError(f"status {response.status_code}: {response.text[:300]}")
    return response.json()
