"""Convert requests from the wire formats to the engine's values, and reports back to the wire formats. Pure code."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from lmx_lab.engine import (
    AnswerFormat,
    ChatPrompt,
    GenerationRequest,
    InfillPrompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolUse,
)
from lmx_lab.engine.grammar.schemas import unenforced
from lmx_lab.engine.requests import Prompt
from lmx_lab.engine.text.tool_prompt import unmatched_results
from lmx_lab.errors import InvalidRequestError
from lmx_lab.server.convert import content_texts, newest_question, placeholder, plain_text
from lmx_lab.values.outputs import GenerationReport, TokenLogprob, ToolCallDelta, merge_tool_calls
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.chat import ChatMessage, ChatRequest, OtherContent, Reasoning, SocketStats, TextContent
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.formats import JsonObjectFormat, JsonSchemaFormat, RegexFormat, TextFormat
from lmx_lab.wire.generation import (
    NAMES,
    CompatibleFields,
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
)
from lmx_lab.wire.tools import AllowedToolsChoice, NamedToolChoice, chosen_names, unique_functions

LOWEST_LOGPROB = -9999.0
"""The log-probability of an impossible token in the chat-completions format, because JSON has no infinity."""
GREEDY: Mapping[str, Any] = {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "xtc_probability": 0.0}
"""Parameters of a greedy request: no token needs to be removed."""
SAMPLING = tuple(Sampling.__dataclass_fields__)
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def generation_request(request: ChatRequest) -> GenerationRequest:
    """Convert a chat request to the engine's request.

    Raises:
        InvalidRequestError: the newest message of the user has a part that is not text.
    """
    tools, offered = None, request.offered
    choice = request.choice if offered else None
    functions = unique_functions(offered) if offered and choice != "none" else {}
    if functions:
        only = choice.function.name if isinstance(choice, NamedToolChoice) else None
        forced = only is not None or choice == "required"
        if isinstance(choice, AllowedToolsChoice):
            functions = {name: functions[name] for name in chosen_names(choice)}
            forced = choice.allowed_tools.mode == "required"
        tools = ToolUse(
            tools=tuple(
                Tool(
                    name=each.name,
                    description=each.description,
                    parameters=NO_ARGUMENTS if each.parameters is None else each.parameters,
                    strict=each.strict is True,
                )
                for each in functions.values()
            ),
            forced=forced,
            only=only,
            parallel=request.parallel_tool_calls is not False and not request.functions,
        )
    answer_format = _answer_format(request)
    is_enforced = answer_format is not None or (tools is not None and tools.forced)
    reasoning = request.reasoning or Reasoning()
    level = request.reasoning_effort or reasoning.effort
    effort = {} if level is None else {"reasoning_effort": level}
    thinks = reasoning.enabled if level != "none" else False
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        thinks = request.thinking.type == "enabled"
    thinks = thinks if request.enable_thinking is None else request.enable_thinking
    thinking = {} if thinks is None else {"enable_thinking": thinks}
    return GenerationRequest(
        prompt=ChatPrompt(
            messages=_messages(request.messages),
            tools=tools,
            template_options={**effort, **thinking, **(request.chat_template_kwargs or {})},
            continues=_continues(request, is_enforced=is_enforced),
        ),
        # If a tool call is forced, the answer contains no text that could have a format.
        answer_format=None if tools is not None and tools.forced else answer_format,
        prediction="".join(content_texts(request.prediction.content)) if request.prediction is not None else "",
        thinking_budget=request.thinking_token_budget,
        max_tokens=request.setting("max_tokens") or 4096,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        after_sampling=bool(request.post_sampling_probs),
        **_parameters(request, temperature=0.7),
    )


def completion_requests(request: CompletionRequest) -> list[GenerationRequest]:
    """Convert a completion request to one request of the engine for each prompt, in order."""
    max_tokens, suffix, parameters = (
        request.setting("max_tokens"),
        request.suffix,
        _parameters(request, temperature=1.0),
    )
    answer_format = _answer_format(request)
    single = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    given: Iterable[Any] = [request.prompt] if single else request.prompt
    prompts: list[Prompt] = []
    for each in given:
        if not isinstance(each, str):
            prompts.append(TokenPrompt(tokens=tuple(each)))
        else:
            prompts.append(TextPrompt(text=each) if suffix is None else InfillPrompt(prefix=each, suffix=suffix))
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=16 if max_tokens is None else max_tokens,
            answer_format=answer_format,
            top_logprobs=request.logprobs,
            # The answer contains the scores only as a part of the echo, and only if log-probabilities are requested.
            score_prompt=bool(request.echo) and request.logprobs is not None,
            **parameters,
        )
        for prompt in prompts
    ]


def requested_model(name: str) -> str | None:
    """Return the id of the model that a request names; None for any model."""
    return None if name == ANY_MODEL else name


def _parameters(request: CompatibleFields, *, temperature: float) -> dict[str, Any]:
    """Return the fields of the engine's request that chats and plain completions share.

    The fields of ``Sampling`` have the same names.

    Args:
        temperature: The default of the format, used for null.
    """
    given: dict[str, Any] = {"temperature": temperature}
    for name in SAMPLING:
        value = request.setting(name) if name in NAMES else getattr(request, name)
        if value is not None:
            given[name] = value
    sampling = Sampling(**given)
    # Only the most likely token has a chance below this temperature, and remains with top_p 0. float32 cannot divide by
    # less than about 1e-38.
    greedy = sampling.temperature < 1e-6 or sampling.top_p == 0
    sampling = replace(
        sampling,
        **GREEDY if greedy else {"top_k": max(0, sampling.top_k)},
        dry_sequence_breakers=None if request.dry_sequence_breakers is None else tuple(request.dry_sequence_breakers),
        # Converted to a dict first: "7" and "07" are the same token, of which the last bias is used.
        logit_bias=tuple({int(token): bias for token, bias in request.logit_bias.items()}.items())
        if request.logit_bias
        else (),
    )
    return {
        "model": requested_model(request.model),
        "sampling": sampling,
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "ignore_eos": bool(request.ignore_eos),
        "min_tokens": request.min_tokens or 0,
        "logprob_tokens": tuple(request.logprob_tokens or ()),
        "steer": tuple(request.steer or ()),
        "share_prefix": bool(request.share_prefix),
    }


def _continues(request: ChatRequest, *, is_enforced: bool) -> bool:
    """Return whether the answer continues the last message.

    Args:
        is_enforced: Whether the answer has a format or must be a call.

    Raises:
        InvalidRequestError: the request requires a continuation, which is not possible.
    """
    last, field = request.messages[-1], "continue_final_message"
    asked = last.prefix if request.continue_final_message is None else request.continue_final_message
    can_continue = last.role == "assistant" and not last.calls and not _blocks(last)[0]
    if request.continue_final_message and not can_continue:
        problem = (
            "is true, but the last message is not one of the assistant without tool_calls; end with the message that "
            "the answer should continue"
        )
    elif asked and can_continue and request.add_generation_prompt:
        problem = "is true, and so is add_generation_prompt, which begins a new answer; leave one of them out"
    elif asked and can_continue and is_enforced:
        problem = (
            "a format of the answer or a forced call is enforced from the beginning of the answer, and cannot be "
            "combined with the continuation of the last message; leave one of them out"
        )
    else:
        continues = can_continue and not request.add_generation_prompt and (not is_enforced if asked is None else asked)
        if continues or request.add_generation_prompt is not False:
            return continues
        field = "add_generation_prompt"
        problem = "is false, which is only supported with a last message that the answer continues; leave it out"
    raise InvalidRequestError(f"{field}: {problem}", param=field)


class _Conversation:
    """The messages for the chat template.

    Results of tools follow the message with their calls, as templates expect it, even if the client has sent other
    messages between them. A call without an id gets one. A result without an id belongs to a call of the last answer
    with calls: the first one of its function that has no result yet, or else the first one that has none. A result
    without such a call, as in a shortened conversation, stays where it is.
    """

    def __init__(self) -> None:
        self.groups: list[list[Mapping[str, Any]]] = []
        """Messages, each followed by the results of its calls."""
        self._waiting: dict[str, list[list[Mapping[str, Any]]]] = {}
        """The groups of the messages with the calls of each id that have no result yet."""
        self._latest: list[tuple[str, str]] = []
        """The id and the function of each call of the last answer with calls."""
        self._calls = 0

    def add(self, message: dict[str, Any], calls: Sequence[tuple[str | None, str, Any]] = ()) -> None:
        """Add a message with its calls: the id, the function and the arguments of each."""
        self.groups.append([message])
        if not calls:
            return
        named = [(id_ or f"call_{at}", *called) for at, (id_, *called) in enumerate(calls, self._calls + 1)]
        message["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in named
        ]
        self._calls += len(calls)
        self._latest = [(id_, name) for id_, name, _ in named]
        for id_, _ in self._latest:
            self._waiting.setdefault(id_, []).append(self.groups[-1])

    def add_result(self, message: dict[str, Any], call_id: str | None) -> None:
        """Add the result of a tool.

        Args:
            call_id: Id of its call; None or an empty text if it is not known.
        """
        if not call_id:
            left = [(id_, name) for id_, name in self._latest if self._waiting.get(id_)]
            of_function = [id_ for id_, name in left if name == message.get("name")]
            call_id = next(iter(of_function or [id_ for id_, _ in left]), None)
        result = {**message, "role": "tool"} | ({} if call_id is None else {"tool_call_id": call_id})
        if called_in := self._waiting.get(call_id or ""):
            called_in.pop().append(result)
        else:
            self.groups.append([result])


def _messages(messages: Sequence[ChatMessage]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages for the chat template.

    Calls and results may also be parts of a message, as in the Messages format, which Cursor sends.
    """
    roles, blocks = [], list(map(_blocks, messages))
    for message, (_, results) in zip(messages, blocks, strict=True):
        has_only_results = bool(results) and len(results) == len(message.content or ())
        roles.append("tool" if has_only_results else message.role)
    newest, conversation = newest_question(roles), _Conversation()
    for number, (message, (used, results)) in enumerate(zip(messages, blocks, strict=True)):
        texts = content_texts(
            message.content or message.refusal or "",
            asked_at=f"messages.{number}.content" if number == newest else None,
        )
        if message.audio is not None and not message.content:
            texts.append(placeholder("audio"))
        has_other_parts = isinstance(message.content, list) and not all(
            isinstance(part, TextContent) for part in message.content
        )
        # Chat templates use the role "system"; "developer" is its newer name in the chat format.
        role = "system" if message.role == "developer" else message.role
        content = ("\n" if has_other_parts else "").join(filter(None, texts))
        converted: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            converted["name"] = message.name
        if (reasoning := message.effective_reasoning) is not None:
            converted["reasoning_content"] = reasoning
        if message.role in ("tool", "function"):
            conversation.add_result(converted, message.tool_call_id)
            continue
        calls: list[tuple[str | None, str, Any]] = []
        if message.role == "assistant":
            calls += [(call.id, call.called.name, call.called.arguments) for call in message.calls]
        for block in used:
            arguments = block.get("input")
            calls.append(
                (_id_in(block, "id"), str(block.get("name")), arguments if isinstance(arguments, dict) else {})
            )
        for block in results:
            result = {"content": plain_text(block.get("content"))}
            conversation.add_result(result, _id_in(block, "tool_use_id"))
        if roles[number] != "tool":
            conversation.add(converted, calls)
    return tuple(itertools.chain.from_iterable(conversation.groups))


def _blocks(message: ChatMessage) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the calls and the results among the parts of a message, as fields of the Messages format."""
    blocks: dict[str, list[dict[str, Any]]] = {"tool_use": [], "tool_result": []}
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, OtherContent) and part.type in blocks:
            blocks[part.type].append(part.model_extra or {})
    return blocks["tool_use"], blocks["tool_result"]


def _id_in(block: Mapping[str, Any], name: str) -> str | None:
    return id_ if isinstance(id_ := block.get(name), str) else None


def fields_without_effect(request: GenerationRequest) -> Iterator[str]:
    """Yield the fields of the chat format that turned out to have no effect: keywords of schemas that are not enforced,
    with the field that contains them, and ids of calls that are not in the conversation.
    """
    if isinstance(request.prompt, ChatPrompt):
        messages = request.prompt.messages
        for at in unmatched_results(messages):
            if "tool_call_id" in messages[at]:
                yield "messages.tool_call_id"
    if (form := request.answer_format) is not None and form.kind == "json_schema" and not form.strict:
        yield from (f"response_format.{name}" for name in unenforced(json.loads(form.text)))
    if isinstance(request.prompt, ChatPrompt) and request.prompt.tools is not None:
        for tool in request.prompt.tools.tools:
            names = [] if tool.strict else unenforced(tool.parameters)
            yield from (f"tools.{tool.name}.{name}" for name in names)


def _answer_format(request: CompatibleFields) -> AnswerFormat | None:
    strict = False
    _, format_ = request.format
    match format_:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            schema = format_.schema_ or ANY_OBJECT
        case JsonSchemaFormat():
            schema, strict = format_.json_schema.schema_, format_.json_schema.strict is True
        case RegexFormat():
            return AnswerFormat(kind="regex", text=format_.regex)
        case _:
            return AnswerFormat(kind="gbnf" if format_.syntax == "gbnf" else "lark", text=format_.grammar)
    return AnswerFormat(kind="json_schema", text=json_text(schema), strict=strict)


def usage(prompts: Iterable[Sequence[GenerationReport]]) -> Usage:
    """Return the usage of all choices of all prompts of one answer. A prompt counts once, since it is computed once."""
    prompt = completion = reasoning = cached = disk_cached = 0
    for reports in prompts:
        from_cache, from_disk = reports[0].prompt_tokens, 0
        prompt += from_cache
        for report in reports:
            # All choices except the first take the whole prompt from the cache.
            from_cache = min(from_cache, report.cached_tokens)
            from_disk = max(from_disk, report.disk_cached_tokens)
            completion += report.output_tokens
            reasoning += report.reasoning_tokens
        cached += from_cache
        disk_cached += min(from_cache, from_disk)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, disk_cached_tokens=disk_cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
    )


def timings(prompts: Sequence[Sequence[GenerationReport]]) -> Timings:
    """Return the timings of all choices of all prompts of one answer.

    Tokens are counted as in ``usage``: a prompt once, and the output of every choice. Times are those of the choice
    that took longest, since choices run at the same time; speeds are computed from them, so they are those of the
    batch. If there are more prompts than slots, they run one after the other, and these speeds are too high.
    """
    total = usage(prompts)
    cached = total.prompt_tokens_details.cached_tokens
    computed, predicted = total.prompt_tokens - cached, total.completion_tokens
    prompt_s = predicted_s = queue_s = ttft_s = 0.0
    peak_bytes = drafted = accepted = 0
    for report in itertools.chain.from_iterable(prompts):
        prompt_s = max(prompt_s, report.prefill_s)
        predicted_s = max(predicted_s, report.decode_s)
        queue_s = max(queue_s, report.queue_s)
        ttft_s = max(ttft_s, report.ttft_s)
        peak_bytes = max(peak_bytes, report.peak_memory_bytes)
        drafted += report.drafted_tokens
        accepted += report.accepted_tokens
    return Timings(
        cache_n=cached,
        cache_disk_n=total.prompt_tokens_details.disk_cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_s * 1e3,
        prompt_per_token_ms=prompt_s * 1e3 / computed if computed else 0.0,
        prompt_per_second=computed / prompt_s if prompt_s > 0 else 0.0,
        predicted_n=predicted,
        predicted_ms=predicted_s * 1e3,
        predicted_per_token_ms=predicted_s * 1e3 / predicted if predicted else 0.0,
        predicted_per_second=predicted / predicted_s if predicted_s > 0 else 0.0,
        queue_ms=queue_s * 1e3,
        ttft_ms=ttft_s * 1e3,
        peak_memory_gb=peak_bytes / 1e9,
        draft_n=drafted,
        draft_n_accepted=accepted,
    )


def socket_stats(report: GenerationReport) -> SocketStats:
    """Convert a report to the statistics that a WebSocket sends at the end of an answer."""
    return SocketStats(
        tokens_per_second=report.tokens_per_second,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.output_tokens,
        reasoning_tokens=report.reasoning_tokens,
        cached_tokens=report.cached_tokens,
        ttft_ms=report.ttft_s * 1e3,
        total_ms=report.total_s * 1e3,
        finish_reason=report.finish_reason,
    )


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return to_json(value, inf_nan_mode="null").decode()


def wire_logprob(logprob: float | None) -> float:
    """Return a log-probability that JSON can represent: minus infinity and NaN become ``LOWEST_LOGPROB``."""
    return logprob if logprob is not None and logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(logprobs: Iterable[TokenLogprob], *, as_probs: bool = False) -> list[dict[str, Any]]:
    """Return the ``content`` of ``ChoiceLogprobs``. It consists of plain values, because this runs for every token.

    Args:
        as_probs: Whether to return ``TokenProbs``.
    """
    if as_probs:
        shown = [token for token in logprobs if not token.ends]
        return [{**_with_prob(token), "top_probs": [_with_prob(other) for other in token.top]} for token in shown]
    return [
        {**_plain(token), "top_logprobs": [_plain(other) for other in token.top]}
        | ({"logprob_tokens": [_plain(other) for other in token.named]} if token.named else {})
        for token in logprobs
        if not token.ends
    ]


def call_chunks(pieces: Iterable[ToolCallDelta]) -> Iterator[dict[str, Any]]:
    """Yield the parts of tool calls in the form of ``ToolCallChunk``: the name of a call, then its arguments."""
    for call in merge_tool_calls(pieces):
        if call.name is not None:
            named = {"name": call.name, "arguments": ""}
            yield {"index": call.index, "id": call.id or "", "type": "function", "function": named}
        if call.arguments:
            yield {"index": call.index, "function": {"arguments": call.arguments}}


def _with_prob(token: TokenLogprob) -> dict[str, Any]:
    prob = 0.0 if token.logprob is None else math.exp(token.logprob)
    return {"token": token.text, "prob": prob, "bytes": list(token.bytes)}


def _plain(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": wire_logprob(token.logprob), "bytes": list(token.bytes)}
