"""Convert generation requests to requests of llama.cpp's server. Pure.

Two of its routes are used. ``/completion`` continues tokens, and the text is split here, as on MLX: reasoning, tool
calls in the generic format, enforced formats, stop strings. ``/v1/chat/completions`` is for answers that may contain
tool calls in the model's own format, or headers: llama.cpp knows dozens of these formats and parses them. That route
enforces nothing (measured: it ignores a ``tool_choice`` and refuses a grammar beside tools), so a format that must be
enforced uses the first one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lmx_lab.engine.requests import ChatPrompt, GenerationRequest
from lmx_lab.engine.text.chat_format_detection import ChatFormat
from lmx_lab.engine.text.tool_prompt import template_tools
from lmx_lab.engine.validation import no_steering_error
from lmx_lab.errors import InvalidRequestError

Route = Literal["/completion", "/v1/chat/completions"]
SAMPLERS = ("penalties", "top_p", "min_p", "top_k", "temperature")
"""The samplers in the order of ``Sampling``. llama.cpp's default list has more samplers, and begins with top_k."""
SEEDS = 2**32 - 1
"""Number of seeds; the largest 32-bit number stands for a random seed."""


def route_of(request: GenerationRequest, chat_format: ChatFormat) -> Route:
    """Return the route for this request.

    Raises:
        InvalidRequestError: neither route supports the request.
    """
    if request.thinking_budget is not None:
        raise InvalidRequestError(
            'llama.cpp does not support thinking_budget; leave it out, or load the model with engine="mlx"',
            param="thinking_budget",
        )
    if request.steer:
        raise no_steering_error("llama.cpp")
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return "/completion"
    own_calls = prompt.tools is not None and chat_format.supports_tools and not prompt.tools.forced
    if not chat_format.has_headers and (not own_calls or request.answer_format is not None):
        return "/completion"
    if request.start is not None:
        raise InvalidRequestError(
            "llama.cpp parses this answer itself, and cannot continue it; leave out tools, or load the model with "
            'engine="mlx"',
            param="token",
        )
    if request.top_logprobs is not None and prompt.tools is not None:
        raise InvalidRequestError(
            "llama.cpp reports no log-probabilities of answers that may call tools; leave out logprobs or tools, or "
            'load the model with engine="mlx"',
            param="logprobs",
        )
    if request.logprob_tokens:
        raise InvalidRequestError(
            "llama.cpp parses the answers of this model itself, and then reports no log-probabilities of named tokens; "
            'leave out logprob_tokens, or load the model with engine="mlx"',
            param="logprob_tokens",
        )
    return "/v1/chat/completions"


def chat_input(request: GenerationRequest, prompt: ChatPrompt, chat_format: ChatFormat, route: Route) -> dict[str, Any]:
    """Return messages, tools and template variables, for ``/apply-template`` and for the chat route."""
    native = route != "/completion"
    variables = chat_format.template_input(request, prompt)
    messages = []
    for message in variables.pop("messages"):
        shown = dict(message)
        if calls := shown.get("tool_calls"):
            # As in the chat format, arguments are JSON strings.
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
        messages.append(shown)
    body: dict[str, Any] = {"messages": messages}
    if (tools := variables.pop("tools", None)) is not None:
        body["tools"] = tools
    elif native and prompt.tools is not None:
        body["tools"] = template_tools(prompt.tools)
    if native and prompt.tools is not None:
        body["parallel_tool_calls"] = prompt.tools.parallel
    if options := {**variables, **prompt.template_options}:
        body["chat_template_kwargs"] = options
    return body


def sampling(request: GenerationRequest, *, choice: int, context_length: int) -> dict[str, Any]:
    """Return all sampling parameters, because llama.cpp's defaults differ from those of ``Sampling``."""
    chosen = request.sampling
    seed = -1 if chosen.seed is None else chosen.seed
    if chosen.seed is not None and (choice or not 0 <= seed < SEEDS):
        digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big") % SEEDS
    return {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "repeat_penalty": chosen.repetition_penalty,
        "presence_penalty": chosen.presence_penalty,
        "frequency_penalty": chosen.frequency_penalty,
        "repeat_last_n": context_length,
        "samplers": list(SAMPLERS),
        "seed": seed,
        "logit_bias": [[token, bias] for token, bias in chosen.logit_bias],
        "ignore_eos": request.ignore_eos,
    }


def completion_body(
    request: GenerationRequest,
    prompt: Sequence[int | str],
    *,
    choice: int,
    max_tokens: int,
    may_end: bool,
    context_length: int,
    grammar: str | None,
    markers: Sequence[str],
    vocabulary_size: int,
    timings: bool = False,
) -> dict[str, Any]:
    """Return the body for ``/completion``.

    Args:
        prompt: Ids of tokens, and texts.
        may_end: Whether the model may end its text.
        markers: Special tokens that the text of the answer must contain, as text.
        timings: Whether each event counts the drafted tokens, and not only the last one.
    """
    body = {
        **sampling(request, choice=choice, context_length=context_length),
        "prompt": list(prompt),
        "ignore_eos": request.ignore_eos or not may_end,
        "n_predict": max_tokens,
        "stream": True,
        # Without it, a cancelled request continues until the end of its prompt (measured).
        "return_progress": True,
        "preserved_tokens": list(markers),
        "timings_per_token": timings,
    }
    if request.top_logprobs is not None:
        # A named token may have any rank.
        body["n_probs"] = vocabulary_size if request.logprob_tokens else max(1, request.top_logprobs)
    if grammar is not None:
        body["grammar"] = grammar
    return body


def chat_body(
    request: GenerationRequest, variables: Mapping[str, Any], *, choice: int, max_tokens: int, context_length: int
) -> dict[str, Any]:
    """Return the body for ``/v1/chat/completions``.

    Args:
        variables: The result of ``chat_input``.
    """
    body = {
        **sampling(request, choice=choice, context_length=context_length),
        **variables,
        "max_tokens": max_tokens,
        "stream": True,
        "return_progress": True,
        "timings_per_token": True,
        "reasoning_format": "deepseek",
    }
    if request.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": max(1, request.top_logprobs)}
    return body
