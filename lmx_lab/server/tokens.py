"""Routes for tokens and the loaded model, as in llama.cpp's server; ``/tokenize`` also accepts vLLM's bodies, and
``/tokenizer_info`` and ``/version`` are routes of vLLM.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from lmx_lab.engine import Caller, GenerationRequest, ModelManager, Sampling, TextPrompt, TokenPrompt
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import NotLoadedError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.guard import is_local
from lmx_lab.http.middleware import VERSION
from lmx_lab.http.openapi import failures
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.answers import json_response
from lmx_lab.server.health import problem
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.server.translate import generation_request, requested_model
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import token_text
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.tokenizer_files import main_template, special_tokens
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.errors import validated
from lmx_lab.wire.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    GenerationSettings,
    Modalities,
    Props,
    Slot,
    TemplateAnswer,
    TemplateRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    VersionAnswer,
)

CHAT_FIELDS = (
    *("model", "messages", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields of a chat that ``/tokenize`` accepts."""
NAMES = {"repetition_penalty": "repeat_penalty"}
"""llama.cpp's names for parameters that have other names here."""


def token_routes(manager: ModelManager) -> APIRouter:
    """Return the router of the routes for tokens and the loaded model."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post("/tokenize", response_model=TokenizeAnswer, responses=INFERENCE_ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a text, or of a chat as the model reads it."""
        if body.text is not None:
            prompt = TextPrompt(text=body.text, special=body.special)
            wanted = GenerationRequest(prompt=prompt, model=requested_model(body.model))
        else:
            fields = {name: getattr(body, name) for name in CHAT_FIELDS}
            wanted = generation_request(validated(ChatRequest, fields))
        wanted = replace(wanted, caller=Caller(local=is_local(request.scope)))
        tokens = await while_connected(request, manager.encode(wanted))
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        answer["max_model_len"] = manager.snapshot.context_length
        if body.with_pieces or body.return_token_strs:
            reading = manager.with_model(wanted, lambda model: model.token_bytes(tokens))
            pieces = await while_connected(request, reading)
            if body.with_pieces:
                pairs = zip(tokens, pieces, strict=True)
                answer["tokens"] = [{"id": token, "piece": _piece(data)} for token, data in pairs]
            if body.return_token_strs:
                answer["token_strs"] = [token_text(data) for data in pieces]
        return json_response(to_json(answer), body.ignored())

    @router.post("/detokenize", response_model=DetokenizeAnswer, responses=INFERENCE_ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        named = GenerationRequest(
            prompt=TokenPrompt(tokens=()),
            model=requested_model(body.model),
            caller=Caller(local=is_local(request.scope)),
        )
        text = await while_connected(request, manager.with_model(named, lambda model: model.decode(body.tokens)))
        content = to_json({"content": text, "prompt": text})
        return json_response(content, body.ignored())

    @router.post("/apply-template", response_model=TemplateAnswer, responses=INFERENCE_ERRORS)
    async def apply_template(body: TemplateRequest, request: Request) -> Response:
        """Return the prompt that the model's chat template makes of a chat."""
        wanted = replace(generation_request(body), caller=Caller(local=is_local(request.scope)))
        rendering = manager.with_model(wanted, lambda model: model.render(wanted))
        text = await while_connected(request, rendering)
        return json_response(to_json({"prompt": text}))

    @router.get("/tokenizer_info", responses=failures(NotLoadedError))
    async def tokenizer_info() -> TokenizerInfo:
        """Describe the tokenizer of the loaded model, for programs that tokenize with this server."""
        now, entry = _loaded(manager)
        template, special = await in_thread(lambda: (main_template(entry), special_tokens(entry)))
        return TokenizerInfo(chat_template=template, model_max_length=now.context_length, **special)

    @router.get("/version")
    async def version() -> VersionAnswer:
        """Return the version of this server, in vLLM's form."""
        return VersionAnswer(version=VERSION)

    @router.get("/slots")
    async def slots() -> list[Slot]:
        """Describe the slots of the loaded model: how many exist, and how many compute an answer."""
        now = manager.snapshot
        busy = now.active_requests
        return [Slot(id=at, n_ctx=now.context_length, is_processing=at < busy) for at in range(now.slots or 0)]

    @router.get("/props", responses=failures(NotLoadedError))
    async def props(request: Request) -> Props:
        """Describe the loaded model."""
        (now, entry), local = _loaded(manager), is_local(request.scope)
        name = public_id(entry.id, local=local)
        defaults = {NAMES.get(key, key): value for key, value in asdict(Sampling()).items()}
        return Props(
            default_generation_settings=GenerationSettings(n_ctx=now.context_length, params=defaults),
            total_slots=now.slots,
            model_alias=name,
            model_path=str(entry.path) if local else name,
            chat_template=await in_thread(lambda: main_template(entry)),
            modalities=Modalities(),
            build_info=manager.fingerprint,
        )

    return router


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _loaded(manager: ModelManager) -> tuple[EngineSnapshot, ModelEntry]:
    """Return the state of the engine, and the loaded model.

    Raises:
        NotLoadedError: there is none.
    """
    now = manager.snapshot
    if (error := problem(now, settings=manager.settings, alive=manager.alive)) is not None:
        raise error
    assert now.entry is not None
    return now, now.entry
