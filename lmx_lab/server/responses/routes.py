"""The routes below ``/v1/responses``: OpenAI's Responses format.

A request is converted to one of the chat format, so that both formats have the same limits, tools and answers.
Responses are kept in memory for ``previous_response_id`` and GET.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import WithJsonSchema
from starlette.requests import HTTPConnection

from lmx_lab.engine import GenerationRequest
from lmx_lab.errors import ConflictError, ContextLengthError, InvalidRequestError, LabError, NotFoundError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import detail_for
from lmx_lab.http.openapi import event_stream, failures, link
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.answers import AnswerRequest, Choices, answer_headers, json_response, respond
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.server.responses.convert import (
    NAMES,
    ConvertedRequest,
    compaction,
    convert_request,
    input_items,
    shared_fields,
)
from lmx_lab.server.responses.writer import PREFIXES, ResponseWriter
from lmx_lab.server.translate import generation_request
from lmx_lab.wire.responses import (
    STORED_ITEMS,
    CompactedResponse,
    CompactRequest,
    DeletedResponse,
    InputTokens,
    ItemReference,
    MessageItem,
    ModelResponse,
    ResponseEvent,
    ResponseItems,
    ResponsesRequest,
    ResponseStatus,
)

SUMMARY_OPTIONS: Mapping[str, Any] = {
    "temperature": 0,
    "max_output_tokens": 2048,
    "reasoning": {"effort": "none"},
    "store": False,
}
SUMMARIZE = (
    "Summarize this conversation for a model that will continue it and sees only your summary and the messages of the "
    "user. Include decisions, facts, names, results of tools, and what remains to be done. Send only the summary."
)
"""The last message of the prompt for a summary."""
ITEM_ID = re.compile(rb'"id":"((?:%s)_[0-9a-z]{26})"' % "|".join({*PREFIXES.values()}).encode())
"""The id of an item in a response, as ``new_id`` writes it."""
NotStreamed = Annotated[bool, WithJsonSchema({"const": False, "description": "Not supported: streams"})]
_ID = {"response_id": "$response.body#/id"}
LINKS = {
    "read": link("inference_get_response", "Read the response.", **_ID),
    "items": link("inference_response_input_items", "Read the conversation before it.", **_ID),
    "cancel": link("inference_cancel_response", "Cancel the response, if it is in the background.", **_ID),
    "delete": link("inference_delete_response", "Delete the response.", **_ID),
}
"""Requests about a response that was created."""


WriterFor = Callable[[str], ResponseWriter]
"""Creates a writer. Its argument is the id of the model that answers, as the caller may see it."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A request that was converted."""

    request: ConvertedRequest
    shared: dict[str, Any]
    """The fields of the response that do not change while it is generated."""
    conversation: bytes | None
    """All items of the conversation, as JSON; None if the response is not stored."""


def http_routes(service: InferenceService, store: ResponseStore) -> APIRouter:
    """Return the router of ``/v1/responses`` without the WebSocket."""
    router = APIRouter(prefix="/v1/responses", tags=["inference"], route_class=StrictRoute, lifespan=store.lifespan)

    @router.post(
        "",
        response_model=ModelResponse,
        responses={
            200: event_stream(
                ResponseEvent,
                description="A response or, with `stream: true`, its named events. An error is sent as the event "
                "`response.failed`",
            )
            | {"links": LINKS},
            **INFERENCE_ERRORS,
        },
    )
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation in the Responses format: completely, with `stream: true` as named events, or with
        `background: true` immediately, before the answer is generated. The same path accepts a WebSocket, whose client
        sends such bodies with `"type": "response.create"`, and receives the data of the events as messages."""
        return await _respond(service, store, body, request)

    @router.post("/input_tokens", response_model=InputTokens, responses=INFERENCE_ERRORS)
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """Count the tokens of a conversation, with its tools, as the model reads them."""
        prompt, _ = await answer_request(body, earlier_of(body, store), None)
        with NAMES.in_errors():
            wanted = replace(prompt, caller=service.caller_of(request))
            count = InputTokens(input_tokens=len(await while_connected(request, service.manager.encode(wanted))))
        return json_response(count.model_dump_json(), body.ignored())

    @router.post("/compact", response_model=CompactedResponse, responses=INFERENCE_ERRORS)
    async def compact_response(body: CompactRequest, request: Request) -> Response:
        """Summarize a conversation with the model. The items of the answer replace the conversation in later requests,
        which are then shorter."""
        items, count = await asyncio.to_thread(earlier_of(body, store).conversation, body)
        if not items:
            raise InvalidRequestError(
                "input: has no message to summarize; send the conversation, or previous_response_id", param="input"
            )
        given = body.model_dump(include={"model", "instructions", "previous_response_id"})
        task = MessageItem(role="user", content=SUMMARIZE)
        fields = {**given, **SUMMARY_OPTIONS, "input": [*items[count:], task]}
        summary = ResponsesRequest.model_validate(fields)
        response = await _respond(service, store, summary, request)
        answer = ModelResponse.model_validate_json(bytes(response.body))
        text = "".join(part["text"] for item in answer.output if item["type"] == "message" for part in item["content"])
        kept = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
        assert answer.usage is not None
        compacted = CompactedResponse(
            id=answer.id,
            created_at=answer.created_at,
            output=[*_shown(STORED_ITEMS.dump_json(kept, exclude_unset=True), answer.id), compaction(text)],
            usage=answer.usage,
        )
        return json_response(compacted.model_dump_json(), body.ignored())

    @router.get("/{response_id}", response_model=ModelResponse, responses=_failures(NotFoundError))
    async def get_response(response_id: str, stream: NotStreamed = False) -> Response:
        """Return a stored response in its current state."""
        if stream:
            raise InvalidRequestError(
                "stream: a stored response is not streamed again; leave stream out, and repeat the request until its "
                "status is no longer in_progress",
                param="stream",
            )
        return json_response(store.get(response_id).body)

    @router.delete("/{response_id}", responses=_failures(NotFoundError))
    async def delete_response(response_id: str) -> DeletedResponse:
        """Delete a stored response. One that is generated in the background is cancelled."""
        store.delete(response_id)
        return DeletedResponse(id=response_id)

    @router.post(
        "/{response_id}/cancel", response_model=ModelResponse, responses=_failures(NotFoundError, ConflictError)
    )
    async def cancel_response(response_id: str) -> Response:
        """Cancel a response that is generated in the background. One that has ended is not changed."""
        return json_response((await store.cancel(response_id)).body)

    @router.get("/{response_id}/input_items", responses=_failures(NotFoundError))
    async def response_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ResponseItems:
        """Return the items of the conversation before a stored response."""
        return await asyncio.to_thread(_page, store.get(response_id), limit, order, after)

    return router


def _failures(*errors: type[LabError]) -> dict[int | str, dict[str, Any]]:
    return failures(*errors, InvalidRequestError, in_path=True)


def _prepare(body: ResponsesRequest, earlier: Earlier, *, keep: bool) -> _Prepared:
    """Convert a request.

    Raises:
        InvalidRequestError: see ``convert_request``.
    """
    items, count = earlier.conversation(body)
    return _Prepared(
        request=convert_request(body, items, earlier=count),
        shared=shared_fields(body),
        conversation=STORED_ITEMS.dump_json(items, exclude_unset=True) if keep else None,
    )


# Answers


async def answer_request(
    body: ResponsesRequest, earlier: Earlier, store: ResponseStore | None
) -> tuple[GenerationRequest, WriterFor]:
    """Return the engine's request, and the function that creates its writer for a model.

    Args:
        store: Receives the response; None does not store it.

    Raises:
        InvalidRequestError: see ``convert_request``.
    """
    with NAMES.in_errors():
        prepared = await asyncio.to_thread(_prepare, body, earlier, keep=store is not None)
        prompt = generation_request(prepared.request.chat)
    if body.generate is False:
        # One token, so that the prompt is computed. The writer leaves it out.
        prompt = replace(prompt, max_tokens=1)
    in_background = bool(body.background) and not body.stream

    def save(writer: ResponseWriter, text: str) -> None:
        """Store a response in its current state, unless it was not to be stored, or was deleted meanwhile."""
        is_new = writer.status == "in_progress" or not in_background
        if store is not None and prepared.conversation is not None and (is_new or writer.id in store):
            store.put(
                StoredResponse(
                    id=writer.id,
                    status=writer.status,
                    body=text.encode(),
                    conversation=prepared.conversation,
                    background=in_background,
                )
            )

    return prompt, lambda model: ResponseWriter(prepared.shared, prepared.request, model=model, save=save)


async def _respond(
    service: InferenceService, store: ResponseStore, body: ResponsesRequest, request: Request
) -> Response:
    prompt, writer_for = await answer_request(body, earlier_of(body, store), store if body.store is not False else None)
    wanted = AnswerRequest(
        prompts=[prompt],
        writer=lambda model, _: writer_for(model),
        stream=bool(body.stream),
        ignored=body.ignored(),
        names=NAMES,
        # Codex CLI shortens its conversation only if a stream reports this error.
        streamed_errors=(ContextLengthError,),
    )
    if not body.background:
        return await respond(service, request, wanted)
    caller = service.caller_of(request)
    choices = Choices(service, [prompt], caller)
    with NAMES.in_errors():
        await while_connected(request, choices.start())
    writer = writer_for(choices.model)
    created, connection = writer.save(), HTTPConnection(request.scope)

    async def generate() -> None:
        """Generate the response. The writer stores it at the end."""
        try:
            async for _ in choices.texts(writer, lambda error: detail_for(connection, error)):
                pass
        except asyncio.CancelledError:
            writer.cancel()

    store.start(writer.id, generate())
    return Response(created, media_type="application/json", headers=answer_headers(service, caller, wanted))


# Stored items


def _page(response: StoredResponse, limit: int, order: Literal["asc", "desc"], after: str | None) -> ResponseItems:
    """Return a page of the items before a response.

    Raises:
        InvalidRequestError: there is no item with the id ``after``.
    """
    items = _shown(response.conversation, response.id)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((number for number, item in enumerate(items, 1) if item["id"] == after), -1)
        if start < 0:
            raise InvalidRequestError(
                f"after: {after[:80]!r:.80} is not the id of an item of {response.id}; send the last_id of a page",
                param="after",
            )
    page = items[start : start + limit]
    return ResponseItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(items),
    )


def _shown(items: bytes, response_id: str) -> list[dict[str, Any]]:
    """Return items as an answer contains them: each has an id and, if it is a message, its content as a list."""
    found = []
    for number, item in enumerate(json.loads(items)):
        kind = item.get("type", "message")
        shown = {"type": kind, **item}
        if not isinstance(item.get("id"), str):
            shown["id"] = f"{PREFIXES.get(kind, 'item')}_{response_id.removeprefix('resp_')}_{number}"
        if kind == "message":
            part = "output_text" if item["role"] == "assistant" else "input_text"
            if isinstance(item["content"], str):
                shown["content"] = [{"type": part, "text": item["content"]}]
            shown.setdefault("status", "completed")
        found.append(shown)
    return found


# The store


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


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The stored responses to which a request refers."""

    previous: StoredResponse | None
    holders: Mapping[str, StoredResponse]
    """The responses with the items to which the input refers, by the id of the item."""

    def conversation(self, body: ResponsesRequest | CompactRequest) -> tuple[list[Any], int]:
        """Return all items of the conversation, including the input, and the number of items before the input.

        Raises:
            InvalidRequestError: no stored response has the item to which the input refers.
        """
        earlier: list[Any] = []
        if self.previous is not None:
            output = STORED_ITEMS.validate_python(json.loads(self.previous.body)["output"])
            earlier = [*STORED_ITEMS.validate_json(self.previous.conversation), *output]
        known: dict[str, Any] = {}
        for each in {holder.id: holder for holder in self.holders.values()}.values():
            shown = [*_shown(each.conversation, each.id), *json.loads(each.body)["output"]]
            known |= {item["id"]: item for item in shown}
        given = input_items(body)
        for at, item in enumerate(given):
            if isinstance(item, ItemReference) and (item.id not in self.holders or item.id not in known):
                raise InvalidRequestError(
                    f"input.{at}.id: no stored response has an item with the id {item.id[:80]!r:.80}; send the item "
                    "itself",
                    param=f"input.{at}.id",
                )
        found = STORED_ITEMS.validate_python([known[item.id] for item in given if isinstance(item, ItemReference)])
        read = iter(found)
        return [*earlier, *(next(read) if isinstance(item, ItemReference) else item for item in given)], len(earlier)


def earlier_of(body: ResponsesRequest | CompactRequest, *stores: ResponseStore) -> Earlier:
    """Return the stored responses to which a request refers, from the first store that has them.

    Raises:
        InvalidRequestError: the previous response is not stored, or not finished.
    """
    before = body.previous_response_id
    store = next((each for each in stores if before in each), stores[-1])
    referenced = [item.id for item in input_items(body) if isinstance(item, ItemReference)]
    return Earlier(
        previous=store.previous(before) if before is not None else None,
        holders={
            item_id: holder
            for item_id in referenced
            for each in reversed(stores)
            if (holder := each.holder(item_id)) is not None
        },
    )


class ResponseStore:
    """Stored responses. The least recently used ones are removed when there are too many.

    Args:
        size_bytes: Maximum size of all responses, with their conversations, as JSON.
    """

    def __init__(self, *, responses: int = 1000, size_bytes: int = 64 * 2**20) -> None:
        self._limit = responses
        self._limit_bytes = size_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size_bytes = 0
        self._holders: dict[str, str] = {}
        """Ids of the responses, by the ids of the items in their output."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks of responses in the background. There are no more than the engine accepts requests."""

    def put(self, response: StoredResponse) -> None:
        """Store a response, or replace the stored one with the same id. One that exceeds the limit is not stored."""
        self._remove(response.id)
        if response.size_bytes > self._limit_bytes:
            return
        self._responses[response.id] = response
        for item_id in ITEM_ID.findall(response.body):
            self._holders.setdefault(item_id.decode(), response.id)
        self._size_bytes += response.size_bytes
        while len(self._responses) > self._limit or self._size_bytes > self._limit_bytes:
            self._remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            NotFoundError: it is not stored.
        """
        if response_id not in self._responses:
            raise NotFoundError(
                f"no stored response has the id {response_id[:80]!r:.80}; the {self._limit:,} most recently used "
                f"responses are kept, up to {self._limit_bytes / 1e6:.0f} MB, unless created with store: false"
            )
        self._responses.move_to_end(response_id)
        return self._responses[response_id]

    def __contains__(self, response_id: str | None) -> bool:
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

    def holder(self, item_id: str) -> StoredResponse | None:
        """Return the response that has an item in its output or its ``input_items``; None if there is none.

        Ids that a client has chosen are not found, because other clients could guess them.
        """
        # ``_shown`` gives items of the conversation ids that contain the id of the response.
        before = item_id.partition("_")[2].rpartition("_")[0]
        return self._responses.get(self._holders.get(item_id, f"resp_{before}"))

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
            for item_id in ITEM_ID.findall(removed.body):
                if self._holders.get(item_id.decode()) == response_id:
                    del self._holders[item_id.decode()]

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
