"""Between the wire's formats and the engine's values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmx_lab.engine import (
    ChatPrompt,
    GenerationReport,
    GenerationRequest,
    Sampling,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from lmx_lab.wire.chat import ChatMessage, ChatRequest, SocketStats
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.generation import LOWEST_LOGPROB, GenerationFields, PromptTokensDetails, Timings, Usage

COLDEST = 1e-6
"""Temperatures below are greedy: nothing but the likeliest token has a chance."""
ANY_MODEL = "default"
"""The model name that stands for whatever is loaded."""


def generation_request(request: ChatRequest) -> GenerationRequest:
    return GenerationRequest(
        prompt=ChatPrompt(messages=tuple(_message(message) for message in request.messages)),
        model=_model(request),
        sampling=_sampling(request, temperature=0.7),
        max_tokens=request.max_completion_tokens or request.max_tokens or 4096,
        stop=_stop(request),
        ignore_eos=bool(request.ignore_eos),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def completion_requests(request: CompletionRequest) -> list[GenerationRequest]:
    """One for each prompt, in order."""
    return [
        GenerationRequest(
            prompt=prompt,
            model=_model(request),
            sampling=_sampling(request, temperature=1.0),
            max_tokens=16 if request.max_tokens is None else request.max_tokens,
            stop=_stop(request),
            ignore_eos=bool(request.ignore_eos),
            top_logprobs=request.logprobs,
            # The engine has to do something: without new tokens it scores, even if nobody reads that.
            score_prompt=bool(request.echo) and request.logprobs is not None,
        )
        for prompt in _prompts(request)
    ]


def _prompts(request: CompletionRequest) -> list[TextPrompt | TokenPrompt]:
    given = request.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    prompts: Iterable[Any] = [given] if single else given
    return [TextPrompt(text=item) if isinstance(item, str) else TokenPrompt(tokens=tuple(item)) for item in prompts]


def _model(request: GenerationFields) -> str | None:
    return None if request.model == ANY_MODEL else request.model


def _stop(request: GenerationFields) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def _sampling(request: GenerationFields, *, temperature: float) -> Sampling:
    """
    Args:
        temperature: What null means.
    """
    temperature = temperature if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    # A nucleus of nothing still holds the likeliest token; float32 cannot divide by less than about 1e-38.
    greedy = temperature < COLDEST or top_p == 0
    return Sampling(
        temperature=0 if greedy else temperature,
        top_p=1.0 if greedy else top_p,
        top_k=0 if greedy else max(0, request.top_k or 0),
        min_p=0.0 if greedy else request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        # As a dict first: "7" and "07" are one token, and the last word about it counts.
        logit_bias=tuple({int(token): bias for token, bias in (request.logit_bias or {}).items()}.items()),
        seed=request.seed,
    )


def _message(message: ChatMessage) -> Mapping[str, Any]:
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    shown = message.model_dump(include={"name", "tool_call_id", "tool_calls"}, exclude_none=True)
    # Chat templates know "system"; "developer" is its newer name.
    return {"role": "system" if message.role == "developer" else message.role, "content": text, **shown}


def usage(choices: Iterable[GenerationReport]) -> Usage:
    """What the choices of one prompt cost together; the prompt counts once, it is computed once."""
    reports = list(choices)
    # Beside the first one, a choice finds its whole prompt computed.
    cached = min(report.cached_tokens for report in reports)
    return _usage(reports[0].prompt_tokens, sum(report.output_tokens for report in reports), cached)


def total_usage(prompts: Iterable[Usage]) -> Usage:
    """What the prompts of one request cost together."""
    parts = list(prompts)
    return _usage(
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.prompt_tokens_details.cached_tokens for part in parts),
    )


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def timings(report: GenerationReport) -> Timings:
    return total_timings([[report]])


def total_timings(prompts: Iterable[Sequence[GenerationReport]]) -> Timings:
    """Of all choices of all prompts of one answer, for clients that read one figure.

    Tokens are counted as in ``usage``: a prompt once, the output of every choice. Times are those of the choice that
    took longest, since choices run side by side, and speeds come from these: they are the batch's. Prompts beyond the
    slots run one after the other, and then these speeds are too high.
    """
    parts = [list(choices) for choices in prompts]
    reports = [report for choices in parts for report in choices]
    spent = total_usage(usage(choices) for choices in parts)
    cached = spent.prompt_tokens_details.cached_tokens
    computed, predicted = spent.prompt_tokens - cached, spent.completion_tokens
    prompt_s = max(report.prefill_s for report in reports)
    predicted_s = max(report.decode_s for report in reports)
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=prompt_s * 1e3,
        prompt_per_token_ms=prompt_s * 1e3 / computed if computed else 0.0,
        prompt_per_second=computed / prompt_s if prompt_s > 0 else 0.0,
        predicted_n=predicted,
        predicted_ms=predicted_s * 1e3,
        predicted_per_token_ms=predicted_s * 1e3 / predicted if predicted else 0.0,
        predicted_per_second=predicted / predicted_s if predicted_s > 0 else 0.0,
    )


def socket_stats(report: GenerationReport) -> SocketStats:
    return SocketStats(
        tokens_per_second=report.tokens_per_second,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.output_tokens,
        cached_tokens=report.cached_tokens,
        ttft_ms=report.ttft_s * 1e3,
        total_ms=report.total_s * 1e3,
        finish_reason=report.finish_reason,
    )


def wire_logprob(logprob: float | None) -> float:
    """As JSON can have it: what is impossible, or no number, is the format's lowest."""
    return logprob if logprob is not None and logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The ``content`` of ``ChoiceLogprobs``, as plain values: this is done for every token."""
    return [
        {**_plain(token), "top_logprobs": [_plain(other) for other in token.top]}
        for token in logprobs
        if not token.ends
    ]


def _plain(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": wire_logprob(token.logprob), "bytes": list(token.bytes)}
