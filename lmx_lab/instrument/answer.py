"""Describe an answer by its tokens, and generate it again from a given position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmx_lab.backend import AnswerCost, Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.outputs import Delta, TokenLogprob, merge_deltas
from lmx_lab.values.recording import NO_HASH, Continuation, Record

NO_TOKENS = (
    "the token ids of this answer are not known, because its server runs in another process, or the engine did not "
    "return all of them; use an answer of a lab that launch() started"
)


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """An answer with its tokens, and the data that are needed to score and to continue it."""

    request: Mapping[str, Any]
    """The request, as in a ``Record``; empty if it is not known."""
    model: str
    weights: str = NO_HASH
    prompt: tuple[int, ...]
    """Token ids of the rendered prompt."""
    ids: tuple[int, ...]
    """Token ids of the answer; empty if they are not known."""
    text: str
    reasoning: str = ""
    calls: bool = False
    """Whether the answer calls tools."""
    finish_reason: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens; empty if they were not requested."""

    @classmethod
    def of_record(cls, record: Record) -> TokenAnswer:
        """Return the answer of a record."""
        return cls(
            request=record.request,
            model=record.provenance.model,
            weights=record.provenance.weights,
            prompt=record.prompt,
            ids=record.answer or (),
            text=record.text,
            reasoning=record.reasoning,
            calls=bool(record.tool_calls),
            finish_reason=record.outcome,
            logprobs=record.logprobs,
        )

    @classmethod
    def of_generation(cls, answer: Delta, cost: AnswerCost, *, weights: str = NO_HASH) -> TokenAnswer:
        """Return the generated answer, which is passed as one delta."""
        return cls(
            request=cost.request,
            model=cost.model,
            weights=weights,
            prompt=cost.prompt,
            ids=answer.ids if len(answer.ids) == answer.tokens else (),
            text=answer.text,
            reasoning=answer.reasoning,
            calls=bool(answer.tool_calls),
            finish_reason=cost.finish_reason,
            logprobs=answer.logprobs,
        )

    @property
    def is_scored(self) -> bool:
        """Whether the log-probability of each token is known."""
        return bool(self.ids) and tuple(token.token for token in self.logprobs) == self.ids

    def continuation(
        self, at: int, token: int | str, *, seed: int | None = None, max_tokens: int | None = None
    ) -> Continuation:
        """Return the request that generates the answer again from a given position.

        Args:
            at: Position of the first token that differs, starting at 0.
            token: The token at this position.

        Raises:
            InvalidRequestError: the position does not exist, or the tokens of the answer are not known.
        """
        if not (self.request and self.prompt and self.ids):
            raise InvalidRequestError(NO_TOKENS, param="at")
        count = len(self.ids)
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < count:
            raise InvalidRequestError(
                f"at is {at!r:.40}; the answer has {count} tokens, at the positions 0 to {count - 1}", param="at"
            )
        if isinstance(token, bool) or not isinstance(token, int | str) or token == "":
            raise InvalidRequestError(
                f"token is {token!r:.80}; it must be the id or the text of one token", param="token"
            )
        for name, value in (("seed", seed), ("max_tokens", max_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidRequestError(f"{name} is {value!r:.40}; it must be an integer", param=name)
        return Continuation(
            request=self.request,
            model=self.model,
            weights=self.weights,
            prompt=self.prompt,
            answer=self.ids[:at],
            token=token,
            seed=seed,
            max_tokens=max_tokens,
        )


async def continue_answer(
    backend: Backend,
    answer: TokenAnswer,
    at: int,
    token: int | str,
    *,
    seed: int | None = None,
    max_tokens: int | None = None,
) -> TokenAnswer:
    """Generate an answer again from a given position; see ``TokenAnswer.continuation``.

    Raises:
        InvalidRequestError: the answer cannot be continued with this token at this position.
        NotLoadedError: another model is loaded.
    """
    continuation = answer.continuation(at, token, seed=seed, max_tokens=max_tokens)
    generated = await generate(backend, continuation)
    if not answer.is_scored or not generated.ids:
        return replace(generated, logprobs=())
    chosen = chosen_token(answer.logprobs[at], generated.ids[at])
    if chosen is None:
        return replace(generated, logprobs=())
    return replace(generated, logprobs=(*answer.logprobs[:at], chosen, *generated.logprobs))


async def generate(backend: Backend, continuation: Continuation, *, recorded: bool = True) -> TokenAnswer:
    """Generate the rest of an answer. The log-probabilities of the result are those of the generated tokens."""
    stream = await backend.continue_answer(continuation, recorded=recorded)
    try:
        deltas = [delta async for delta in stream]
    finally:
        stream.close()
    return TokenAnswer.of_generation(merge_deltas(deltas), backend.cost(stream), weights=continuation.weights)


def chosen_token(position: TokenLogprob, token: int) -> TokenLogprob | None:
    """Return a token as if it had been chosen at a position; None if its log-probability is not known."""
    if position.token == token:
        return position
    for rank, other in enumerate(position.top, 1):
        if other.token == token:
            return replace(other, top=position.top, named=position.named, entropy=position.entropy, rank=rank)
    for other in position.named:
        if other.token == token:
            return replace(other, top=position.top, named=position.named, entropy=position.entropy)
    return None
