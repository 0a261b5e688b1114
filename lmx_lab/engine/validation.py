"""Check prompts and texts, for all engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, Sampling, TokenPrompt
from lmx_lab.errors import ContextLengthError, InvalidRequestError, UnusableModelError, counted
from lmx_lab.values.models import KINDS_IN_WORDS, KvCacheDtype, LoadSpec, ModelEntry
from lmx_lab.values.steering import SteeringVector, read_components

CHARACTERS_PER_TOKEN = 10
"""Maximum number of characters of ordinary text for each token. If a text has more for each token of the context, only
its beginning is tokenized."""
MAX_CHARACTERS_PER_TOKEN = 100
"""A text with more characters than this for each token of the context is refused without tokenizing it, because 5 MB of
spaces would take seconds. The longest word that WordPiece converts to a token has 100 characters."""
COUNTED_TOKENS = 200_000
"""Number of tokens that are counted in any prompt, even if the context length is smaller. Agents count prompts to find
out whether they fit. Two million characters of code take 3 s."""
MAX_PADDING_TOKENS = 128
"""Maximum difference of the vocabularies of a model and its draft model, as in llama.cpp. Models of one family pad
their vocabulary to different sizes."""


def check_options(entry: ModelEntry, spec: LoadSpec) -> None:
    """Check the options of a load that only chat models have.

    Raises:
        UnusableModelError: the model cannot be loaded with these options.
    """
    context_length = spec.context_length
    given = {
        "context_length": context_length is not None,
        "deterministic": spec.deterministic,
        "kv_cache_dtype": spec.kv_cache_dtype is not None,
        "draft": spec.draft is not None,
    }
    if entry.kind != "chat" and any(given.values()):
        option = next(name for name, is_given in given.items() if is_given)
        raise UnusableModelError(f"{entry.id} is not a chat model; load it without {option}", param=option)
    if spec.kv_cache_dtype not in (None, *get_args(KvCacheDtype)):
        raise UnusableModelError(
            f"kv_cache_dtype is {spec.kv_cache_dtype!r}; the values are {' and '.join(get_args(KvCacheDtype))}",
            param="kv_cache_dtype",
        )
    if spec.draft is not None and spec.prompt_lookup:
        raise UnusableModelError("both draft and prompt_lookup are given; leave out one of them", param="draft")
    if (draft := entry.draft) is not None and draft.kind != "chat":
        raise UnusableModelError(
            f"{draft.id} is {KINDS_IN_WORDS[draft.kind]}; a draft model must be a chat model", param="draft"
        )
    if context_length is None:
        return
    most = entry.context_length or 2**31 - 1
    if not isinstance(context_length, int) or not 0 < context_length <= most:
        raise UnusableModelError(
            f"context_length is {context_length!r}; {entry.id} takes 1 to {most}", param="context_length"
        )


def check_vocabularies(
    entry: ModelEntry, draft: ModelEntry, tokens: Sequence[object], drafted: Sequence[object]
) -> None:
    """Check that a draft model has the vocabulary of its target, except for padding at the end.

    Args:
        tokens, drafted: The tokens of both models, in the order of their ids.

    Raises:
        UnusableModelError: the vocabularies differ.
    """
    different = sum(a != b for a, b in zip(tokens, drafted, strict=False))
    if not different and abs(len(tokens) - len(drafted)) <= MAX_PADDING_TOKENS:
        return
    detail = f"; different tokens: {different:,}" if different else ""
    raise UnusableModelError(
        f"the draft model {draft.id} has a vocabulary of {len(drafted):,} tokens and {entry.id} one of "
        f"{len(tokens):,}{detail}; choose a smaller model with the same tokenizer",
        param="draft",
    )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages with lone surrogates.

    Raises:
        InvalidRequestError: a message has one; ``param`` names the message.
    """
    for at, message in enumerate(messages):
        check_characters(str(message.get("content", "")), f"messages.{at}.content")


def check_characters(text: str, param: str) -> None:
    """Refuse lone surrogates, which cannot be encoded.

    Raises:
        InvalidRequestError: the text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        what = f"the lone surrogate {exc.object[exc.start]!r}, which cannot be encoded"
        raise InvalidRequestError(f"{param} has {what}", param=param) from exc


def check_size(text: str | tuple[str, str], context_length: int, model: str, param: str) -> None:
    """Refuse a text, or a pair, that cannot fit into the context of a model.

    Raises:
        ContextLengthError: it has too many characters.
    """
    characters, limit = (
        sum(map(len, (text,) if isinstance(text, str) else text)),
        context_length * MAX_CHARACTERS_PER_TOKEN,
    )
    if characters > limit:
        raise context_error(
            f"{param} is too long: {characters} characters > {limit} maximum, {MAX_CHARACTERS_PER_TOKEN} a token",
            model,
            context_length,
            "shorten it",
            param=param,
        )


def context_error(excess: str, model: str, limit: int, remedy: str, *, param: str) -> ContextLengthError:
    """Return the error of a text that does not fit into the context of a model.

    Agents that shorten their conversation recognize it by its words: "This model's maximum context length is N tokens"
    (LiteLLM, pi, opencode) or "prompt is too long: N tokens > M maximum" (Claude Code).

    Args:
        excess: What is too long, by how much.
        limit: Number of tokens that fit.
    """
    return ContextLengthError(
        f"{excess}. This model's maximum context length is {limit} tokens ({model}); {remedy}", param=param
    )


def param_of(request: GenerationRequest) -> str:
    """Return the name of the request's prompt in error messages."""
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"


def check_length(request: GenerationRequest, prompt: Sequence[int], entry: ModelEntry, limit: int | None) -> None:
    """Check that a prompt leaves room for an answer.

    Args:
        limit: Number of tokens, prompt and answer, that fit in the model's context; None without a limit.

    Raises:
        InvalidRequestError: the prompt is empty.
        ContextLengthError: the prompt leaves no room.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty: it has no tokens", param=param_of(request))
    if limit is not None and len(prompt) + min(1, request.max_tokens) > limit:
        raise too_long(request, str(len(prompt)), entry, limit)


def readable_tokens(request: GenerationRequest, context: int) -> int:
    """Return how many tokens of a prompt are read, to generate an answer or to count them."""
    return max(context, COUNTED_TOKENS) if request.is_counted else context


def too_long(request: GenerationRequest, tokens: str, entry: ModelEntry, limit: int) -> ContextLengthError:
    """Return the error of a prompt that does not fit.

    Args:
        tokens: Number of its tokens, or a lower bound such as ``more than 512``.
    """
    if request.is_counted:
        what = f"prompt is too long to be counted: {tokens} tokens > {limit} maximum; count its parts separately"
        return ContextLengthError(what, param=param_of(request))
    own, model, remedy = entry.context_length, f"{entry.id}, including the answer", "shorten the prompt"
    if own is not None and limit < own:
        model = f"{entry.id} as it is loaded, including the answer; its own limit is {own}"
        remedy += ", or load the model with a larger context_length, as far as memory allows"
    excess = f"prompt is too long: {tokens} tokens > {limit} maximum"
    return context_error(excess, model, limit, remedy, param=param_of(request))


def check_tokens(request: GenerationRequest, entry: ModelEntry, vocabulary_size: int) -> None:
    """Check the token ids that a generation request contains.

    Raises:
        InvalidRequestError: one is not in the vocabulary.
    """
    if bias := request.sampling.logit_bias:
        check_token_ids([token for token, _ in bias], "logit_bias", entry, vocabulary_size)
    if named := request.logprob_tokens:
        ids = [token for token in named if isinstance(token, int)]
        check_token_ids(ids, "logprob_tokens", entry, vocabulary_size)
    if isinstance(request.prompt, TokenPrompt):
        check_token_ids(request.prompt.tokens, "prompt", entry, vocabulary_size)
    if (start := request.start) is not None:
        check_token_ids([*start.prompt, *start.answer], "answer", entry, vocabulary_size)
        check_token_ids([start.token] if isinstance(start.token, int) else [], "token", entry, vocabulary_size)


def check_steering(steer: Sequence[SteeringVector], model: str, *, layers: int, width: int) -> None:
    """Check that the vectors of a request fit the model.

    Args:
        layers, width: Number of layers of the model, and size of its residual stream.

    Raises:
        InvalidRequestError: the model does not have the layer of a vector, or the vector has another size.
    """
    for each in steer:
        if each.layer >= layers:
            raise InvalidRequestError(
                f"steer has a vector for layer {each.layer}; {model} has {counted(layers, 'layer')}, 0 to {layers - 1}",
                param="steer",
            )
        if (components := len(read_components(each.vector, each.scale))) != width:
            raise InvalidRequestError(
                f"steer has a vector of {counted(components, 'component')}; the residual stream of {model} has "
                f"{width}: make the vector with this model",
                param="steer",
            )


def check_steered_weights(steer: Sequence[SteeringVector], entry: ModelEntry, weights: str) -> None:
    """Check that the vectors of a request were made for this model.

    Args:
        weights: SHA-256 of the files of the model.

    Raises:
        InvalidRequestError: one was made for another model.
    """
    for each in steer:
        if each.weights and each.weights != weights:
            raise InvalidRequestError(
                f"steer has a vector for a model whose files have the SHA-256 {each.weights}; those of {entry.id} have "
                f"{weights or 'none'}: load that model, or make the vector with this one",
                param="steer",
            )


def no_steering_error(engine: str) -> InvalidRequestError:
    """Return the error of a request with vectors for an engine that cannot add them."""
    return InvalidRequestError(
        f'{engine} does not support steer; leave it out, or load the model with engine="mlx"', param="steer"
    )


def check_samplers(sampling: Sampling, engine: str) -> None:
    """Check that a request does not need llama.cpp's own samplers.

    Raises:
        InvalidRequestError: it does.
    """
    for name in ("dry_multiplier", "xtc_probability"):
        if getattr(sampling, name):
            raise InvalidRequestError(
                f'{engine} does not support {name}; leave it out, or load a GGUF model with engine="llama.cpp"',
                param=name,
            )


def check_token_ids(tokens: Sequence[int], param: str, entry: ModelEntry, vocabulary_size: int) -> None:
    """Check token ids that a caller sent.

    Raises:
        InvalidRequestError: one is not in the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocabulary_size:
            raise InvalidRequestError(
                f"{param} has the token id {token}; {entry.id} knows 0 to {vocabulary_size - 1}", param=param
            )


def check_text(
    tokens: Sequence[int], param: str, entry: ModelEntry, limit: int, *, truncate: bool, count: str | None = None
) -> None:
    """Check the length of a text to embed or to rank.

    Args:
        limit: Maximum number of tokens of a text.
        truncate: Whether a longer text is truncated instead of refused.
        count: The number of tokens for the error message, if ``tokens`` are only the beginning of the text.

    Raises:
        InvalidRequestError: the text is empty.
        ContextLengthError: the text is longer than the limit.
    """
    if not tokens:
        raise InvalidRequestError(f"{param} is empty: it has no tokens", param=param)
    if len(tokens) > limit and not truncate:
        raise text_too_long(param, str(count or len(tokens)), entry, limit)


def text_too_long(param: str, tokens: str, entry: ModelEntry, limit: int) -> ContextLengthError:
    """Return the error of a text to embed or to rank that does not fit. For ``tokens``, see ``too_long``."""
    remedy = "shorten it" if param == "query" else "shorten it or send truncate: true"
    excess = f"{param} is too long: {tokens} tokens > {limit} maximum"
    return context_error(excess, entry.id, limit, remedy, param=param)


def check_dimensions(dimensions: int | None, available: int | None, entry: ModelEntry) -> None:
    """Check the requested number of components of a vector.

    Raises:
        InvalidRequestError: vectors of the model have fewer components.
    """
    if dimensions is not None and available is not None and dimensions > available:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; vectors of {entry.id} have {available}", param="dimensions"
        )
