"""A program that uses the clients, which mypy accepts."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import assert_never

from bodies import chat_request, embedding_request, rerank_request

from lmx_lab.blocking import BlockingStream
from lmx_lab.client import (
    AsyncDaemonClient,
    AsyncLabClient,
    AsyncSession,
    BlockingSubscription,
    ConnectionState,
    Cursor,
    CursorStore,
    DaemonClient,
    FileCursor,
    LabClient,
    LabEvent,
    MemoryCursor,
    Session,
    Subscription,
    TurnResult,
    UnknownLabEvent,
    as_array,
)
from lmx_lab.client.daemon_events import (
    DaemonEvent,
    PermissionRequestEvent,
    TurnDoneEvent,
    TurnTokenEvent,
    UnknownEvent,
)
from lmx_lab.errors import LabError, TurnError
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import NotReady
from lmx_lab.wire.chat import ChatChunk
from lmx_lab.wire.mcp import McpServerConfig, McpTestPassed
from lmx_lab.wire.sessions import PermissionRecord, SessionSnapshot, SubmitTurn, TurnOverrides


def text_of(chunk: ChatChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def show(step: ModelEvent) -> None:
    print(step.stage, step.done_bytes)


def lab_blocking(url: str) -> Iterator[str]:
    with LabClient(url, api_key="key", timeout_s=1.0) as client:
        yield client.chat(chat_request("hi")).choices[0].message.content or ""
        chunks: BlockingStream[ChatChunk] = client.stream(chat_request("hi"), over="websocket")
        with chunks:
            for chunk in chunks:
                yield text_of(chunk)
        for part in client.stream_with_remarks(chat_request("hi")):
            yield text_of(part) if isinstance(part, ChatChunk) else part.text
        print(as_array(client.embed(embedding_request("a", "b"))).shape)
        print(client.rerank(rerank_request("q", "a")).results[0].relevance_score)
        print(client.load("tiny", progress=show).vram_gb, client.unload().freed_vram_gb, client.models().models[0].id)
        ready = client.ready()
        print(client.version(), ready.error.code if isinstance(ready, NotReady) else ready.model)
        for event in client.events(["models"]):
            seen: LabEvent = event
            print(seen.text if isinstance(seen, UnknownLabEvent) else seen.type)


async def lab_async(url: str) -> None:
    async with AsyncLabClient(url) as client:
        answer = await client.chat(chat_request("hi"))
        print(answer.choices[0].finish_reason, answer.usage.total_tokens)
        async with aclosing(client.stream(chat_request("hi"), over="sse")) as chunks:
            async for chunk in chunks:
                print(text_of(chunk))
        print((await client.load("tiny", progress=show)).model)


def decide(permission: PermissionRecord) -> bool:
    return permission.tool == "add"


async def decide_later(permission: PermissionRecord) -> bool:
    await asyncio.sleep(0)
    return decide(permission)


def print_event(event: DaemonEvent) -> None:
    match event:
        case TurnTokenEvent():
            print(event.data.text, event.seq)
        case TurnDoneEvent():
            print(event.stats.tokens, event.data.stop_reason)
        case PermissionRequestEvent():
            print(event.data.permission.permission_id)
        case UnknownEvent():
            print(event.event)
        case _:
            print(event.at)


def describe(result: TurnResult) -> str:
    for call in result.tool_calls:
        print(call.name, call.status, call.text, call.elapsed_s)
    return f"{result.text} {result.stop_reason} {result.reconnects}"


def describe_state(state: ConnectionState) -> str:
    match state.state:
        case "connecting" | "catching-up" | "live":
            return state.state
        case "waiting" | "closed":
            return str(state.error)
    assert_never(state.state)


def daemon_blocking(home: Path) -> None:
    with DaemonClient.discover(home) as client, DaemonClient("http://there", token=None) as other:
        session: Session = client.session("s", title="t", tools=["add"], metadata={"a": [1, None]})
        result = session.run("hi", on_permission=decide, on_event=print_event, overrides=TurnOverrides(max_tokens=3))
        print(describe(result), other.url)
        for event in session.stream("hi", on_permission="deny", when_busy="reject"):
            print_event(event)
        snapshot: SessionSnapshot = session.snapshot()
        print(snapshot.messages[0].content, session.change(title=None, archived=True).revision)
        print(
            session.fork(title="f").session_id, session.cancel(queued=True).turn_ids, session.turn("t", wait_s=1).text
        )
        session.delete()
        print(client.health().status, client.state().upstream.url, client.sessions(limit=3).next_cursor)
        print([client.decide(it.permission_id, "allow", scope="session").decision for it in client.permissions()])
        tested = client.test_mcp_server(McpServerConfig(name="time", command="python", args=("-m", "time")))
        client.add_mcp_server({"name": "time", "command": "python", "args": ["-m", "time"]})
        print(tested.tools[0].name if isinstance(tested, McpTestPassed) else tested.error)
        print(client.submit_turn("s", SubmitTurn(content="hi")).cursor, client.page(after=0).cursor)
        store: CursorStore = FileCursor(home / "cursor")
        events: BlockingSubscription = client.events(cursor=store, types=["turn.*"])
        with events:
            for event in events:
                print_event(event)
            print(describe_state(events.state), events.cursor, events.reconnects)
        client.shut_down(mode="now")


async def daemon_async(home: Path) -> AsyncIterator[str]:
    async with AsyncDaemonClient.discover(home) as client:
        session: AsyncSession = await client.session()
        try:
            yield describe(await session.run("hi", on_permission=decide_later, on_event=print_event))
        except TurnError as exc:
            yield exc.message
        except LabError as exc:
            yield f"{exc.code} {exc.retry_after_s}"
        async for event in session.stream("hi"):
            print_event(event)
        store = MemoryCursor()
        store.save(Cursor(stream_id="stm", seq=3))
        subscription: Subscription = client.events(cursor=store)
        async with subscription as events:
            async for event in events:
                print_event(event)
        async for state in subscription.states():
            yield describe_state(state)
