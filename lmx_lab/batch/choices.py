"""Score choices: compute the log-probability of each of several texts after a prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lmx_lab.backend import Backend, read_answer
from lmx_lab.batch.answer import RowAnswer
from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.values.generation import TokenLogprob
from lmx_lab.wire.chat import ChatRequest

MAX_NAMED_TOKENS = 64
"""Maximum length of ``logprob_tokens``."""


async def score_choices(
    backend: Backend, request: ChatRequest, choices: Sequence[str], *, chat_template: bool
) -> RowAnswer:
    """Return the log-probability of each choice after a prompt.

    Args:
        chat_template: Whether the choices are answers to the chat. If False, they continue the text of its message.

    Raises:
        LabError: the prompt or a choice cannot be scored.
    """
    started_at = time.monotonic()
    if not chat_template:
        prompt, tokens = await text_tokens(backend, plain_text(request), choices)
    else:
        # The answer to a chat begins after tokens of its template, so each choice is tokenized separately.
        tokens = [list(await backend.encode(choice, special=False)) for choice in choices]
        if all(len(each) == 1 for each in tokens) and len(tokens) <= MAX_NAMED_TOKENS:
            return await _score_first_token(backend, request, [each[0] for each in tokens], started_at)
        prompt = list(await backend.encode(request))
    if not all(tokens):
        raise InvalidRequestError("a choice has no tokens; remove it")
    logprobs = [await _score(backend, request.model, prompt, each) for each in tokens]
    return RowAnswer(logprobs=logprobs, prompt_tokens=len(prompt), total_s=time.monotonic() - started_at)


def plain_text(request: ChatRequest) -> str:
    """Return the prompt of a request without a chat template.

    Raises:
        InvalidRequestError: the request has several messages, or its content is not a text.
    """
    content = request.messages[0].content
    if len(request.messages) != 1 or not isinstance(content, str) or not content.strip():
        raise InvalidRequestError(
            "without chat_template, the prompt of each row must be a text, and there is no system prompt",
            param="prompt",
        )
    return content


async def text_tokens(backend: Backend, text: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a text, and those with which each choice continues it.

    They are divided as in lm-evaluation-harness: spaces at the end of the text belong to the choices, and the tokens of
    a choice are those of the whole text from the position at which the text alone ends.
    """
    prompt = text.rstrip()
    spaces = text[len(prompt) :]
    first = list(await backend.encode(prompt))
    whole = [list(await backend.encode(prompt + spaces + choice)) for choice in choices]
    return first, [tokens[len(first) :] for tokens in whole]


async def _score(backend: Backend, model: str, prompt: list[int], choice: list[int]) -> float:
    scores = await backend.score([*prompt, *choice], model=model, top=0, start=len(prompt))
    return _sum(scores)


async def _score_first_token(
    backend: Backend, request: ChatRequest, tokens: Sequence[int], started_at: float
) -> RowAnswer:
    """Score choices of one token each, with one request that generates one token after the prompt."""
    named = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 0, "logprob_tokens": list(tokens)}
    answer, cost = await read_answer(backend, request.model_copy(update=named), batch=True)
    if not answer.logprobs or len(answer.logprobs[0].named) != len(tokens):
        raise LabError("the server did not report the log-probabilities of the choices")
    return RowAnswer(
        logprobs=[_sum([each]) for each in answer.logprobs[0].named],
        prompt_tokens=cost.usage.prompt_tokens,
        cached_tokens=cost.usage.prompt_tokens_details.cached_tokens,
        total_s=time.monotonic() - started_at,
        request_id=cost.request_id,
    )


def _sum(scores: Sequence[TokenLogprob]) -> float:
    return math.fsum(score.logprob for score in scores if score.logprob is not None)
