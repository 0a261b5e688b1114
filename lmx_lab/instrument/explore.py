"""Generate the answers that begin with the most probable tokens, and return them as a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.access import LabAccess
from lmx_lab.instrument.answer import TokenAnswer, chosen_token, generate
from lmx_lab.instrument.tree import AnswerTree, Branch
from lmx_lab.values.generation import TokenLogprob, merge_deltas
from lmx_lab.values.recording import Continuation
from lmx_lab.wire.chat import ChatRequest

T = TypeVar("T")
MAX_LEAVES = 64
MAX_WIDTH = 20
"""Maximum number of alternatives in a request."""


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """The first tokens of an answer."""

    ranks: tuple[int, ...] = ()
    """The rank of each token at its position, starting at 1."""
    tokens: tuple[TokenLogprob, ...] = ()
    ended: bool = field(default=False)
    """Whether the answer ends with these tokens."""

    @property
    def name(self) -> str:
        return "-".join(map(str, self.ranks))

    def extended(self, position: TokenLogprob, width: int) -> list[_Beginning]:
        """Return this beginning with each of the most probable tokens of a position."""
        result = []
        for rank, other in enumerate(position.top[:width], 1):
            token = chosen_token(position, other.token) if other.token is not None else None
            if token is not None:
                result.append(_Beginning(ranks=(*self.ranks, rank), tokens=(*self.tokens, token)))
        return result


async def explore(
    backend: Backend, request: ChatRequest, lab: LabAccess, *, width: int, depth: int, max_tokens: int
) -> AnswerTree:
    """Return the tree of the answers that begin with the most probable tokens.

    At each of the first ``depth`` positions, the ``width`` most probable tokens are taken. The answers that begin with
    them are generated together, with the sampling of the request.

    Raises:
        InvalidRequestError: an argument is out of range, or the answer cannot be continued after one of the tokens, for
            example because ``response_format`` does not allow the token.
    """
    _check(width, depth, max_tokens)
    first = await _first_position(backend, request, width)
    if not first.ids or not first.logprobs:
        raise InvalidRequestError(
            "the token ids of this answer are not known, because its server runs in another process, or the engine "
            'does not return them; use a lab that launch() started, and leave out tools or load with engine="mlx"'
        )
    beginnings = _Beginning().extended(first.logprobs[0], width)
    for _ in range(1, depth):
        positions = await _together([_next_position(backend, first, it, width) for it in beginnings])
        beginnings = [
            longer
            for it, position in zip(beginnings, positions, strict=True)
            for longer in (it.extended(position, width) if position is not None else [replace(it, ended=True)])
        ]
    answers = await _together([_generate(backend, first, it, max_tokens=max_tokens, top=width) for it in beginnings])
    return _tree(beginnings, answers, lab)


def _check(width: int, depth: int, max_tokens: int) -> None:
    for name, value, most in (("width", width, MAX_WIDTH), ("depth", depth, MAX_LEAVES)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InvalidRequestError(f"{name} is {value!r:.40}; it must be from 1 to {most}", param=name)
    if width**depth > MAX_LEAVES:
        raise InvalidRequestError(
            f"width {width} and depth {depth} give {width**depth} answers; the limit is {MAX_LEAVES}", param="depth"
        )
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < depth:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens!r:.40}; with depth {depth} it must be at least {depth}", param="max_tokens"
        )


async def _first_position(backend: Backend, request: ChatRequest, width: int) -> TokenAnswer:
    fields = {"max_tokens": 1, "max_completion_tokens": None, "logprobs": True, "top_logprobs": width}
    stream = await backend.generate(request.model_copy(update=fields))
    try:
        deltas = [delta async for delta in stream]
    finally:
        stream.close()
    return TokenAnswer.of_generation(merge_deltas(deltas), stream.cost())


async def _next_position(
    backend: Backend, first: TokenAnswer, beginning: _Beginning, width: int
) -> TokenLogprob | None:
    """Return the token after a beginning, with its alternatives; None if the answer has ended."""
    if beginning.ended:
        return None
    limit = len(beginning.tokens) + 1
    answer = await _generate(backend, first, beginning, max_tokens=limit, top=width, recorded=False)
    return answer.logprobs[0] if answer.logprobs else None


async def _generate(
    backend: Backend, first: TokenAnswer, beginning: _Beginning, *, max_tokens: int, top: int, recorded: bool = True
) -> TokenAnswer:
    """Generate the rest of an answer.

    Raises:
        InvalidRequestError: the answer cannot be continued after the last token of the beginning.
    """
    try:
        return await generate(
            backend, _continuation(first, beginning, max_tokens=max_tokens, top=top), recorded=recorded
        )
    except InvalidRequestError as exc:
        if exc.param != "token":
            raise
        # The caller did not choose the token, so the error explains its origin.
        at, text = len(beginning.tokens) - 1, beginning.tokens[-1].text
        remedy = "; leave out response_format, so that all tokens are allowed" if _has_format(first) else ""
        raise InvalidRequestError(
            f"explore selects the most probable tokens, and cannot continue after {text!r:.80} at position {at}: "
            f"{exc.message}{remedy}"
        ) from exc


def _has_format(answer: TokenAnswer) -> bool:
    return answer.request.get("answer_format") is not None


def _continuation(first: TokenAnswer, beginning: _Beginning, *, max_tokens: int, top: int) -> Continuation:
    ids = [token.token for token in beginning.tokens if token.token is not None]
    return Continuation(
        request=first.request,
        model=first.model,
        prompt=first.prompt,
        answer=tuple(ids[:-1]),
        token=ids[-1],
        max_tokens=max_tokens,
        top_logprobs=top,
    )


def _tree(beginnings: Sequence[_Beginning], answers: Sequence[TokenAnswer], lab: LabAccess) -> AnswerTree:
    """Return the tree in which each answer branches from the one with the most probable tokens at these positions."""
    scored = [
        replace(answer, logprobs=(*beginning.tokens, *answer.logprobs))
        for beginning, answer in zip(beginnings, answers, strict=True)
    ]
    tree = AnswerTree(scored[0], lab, name=beginnings[0].name)
    nodes: dict[tuple[int, ...], Branch] = {_place(beginnings[0].ranks): tree.root}
    for beginning, answer in zip(beginnings[1:], scored[1:], strict=True):
        place = _place(beginning.ranks)
        at = len(place) - 1
        token = beginning.tokens[at]
        parent = nodes[_place(place[:at])]
        nodes[place] = tree.add(parent, at, token.text, answer=answer, name=beginning.name)
    return tree


def _place(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks up to the last token that is not the most probable one."""
    count = len(ranks)
    while count and ranks[count - 1] == 1:
        count -= 1
    return tuple(ranks[:count])


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time. If one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each, name="explore") for each in work]
    except* Exception as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
