"""An embedder or reranker in memory: reading its files on the engine thread, and running it there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import tokenizer_utils

from lmx_lab.engine.encoders import bert, modernbert
from lmx_lab.engine.encoders.bert import Bert, FirstTokenHead
from lmx_lab.engine.encoders.decoder import read_classifier, read_decoder, read_logit_reranker
from lmx_lab.engine.encoders.layers import on_cpu
from lmx_lab.engine.encoders.modernbert import ModernBert, ModernBertHead
from lmx_lab.engine.encoders.network import Config, Head, Network
from lmx_lab.engine.encoders.padding import PaddedBatch
from lmx_lab.engine.encoders.pooling import Operation, PooledHead, operation
from lmx_lab.engine.encoders.prompts import ChatPairs, PairForm, QwenPairs
from lmx_lab.engine.encoders.recipe import ChatForm, LogitTokens, Normalize, Pooling, PoolingMode, Recipe, read_recipe
from lmx_lab.engine.encoders.tensors import Tensors
from lmx_lab.engine.encoders.tokens import TextRules, TextTokenizer, TextTokens
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.weights_dtype import DTYPES
from lmx_lab.engine.word_cache import without_word_cache
from lmx_lab.errors import EngineError, LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.encoding import RerankMethod, Vectors
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.folder import ENCODERS, read_card, read_json

log = logging.getLogger(__name__)
HERE = frozenset({"bert", "modernbert"}) | bert.ROBERTAS
"""Encoders whose layers are known here, by ``model_type``."""
NO_LIMIT_TOKENS = 10**9
"""Tokenizers without a limit give one beyond this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """An embedder or a reranker in memory. ``texts`` belongs to the texts' thread, the rest to the engine's."""

    entry: ModelEntry
    memory_bytes: int
    """What the model takes, measured."""
    context_length: int | None
    """Tokens of one text at most, special ones included."""
    dimensions: int | None
    """Of a vector; None for rerankers."""
    method: RerankMethod
    texts: TextTokenizer
    network: Network
    head: Head
    sigmoid: bool
    """Whether the model's files want a score to be one between 0 and 1."""

    def passes(self, batch: Sequence[TextTokens]) -> Generator[mx.array, None, Vectors]:
        """Compute a batch layer by layer; texts of about the same length waste least.

        Yields the hidden state after each layer, in general not yet computed (of long texts partly): a caller may
        compute it, do something else, or close the generator. Returns (texts, dimensions) vectors as the model's files
        want them or, of a reranker, (texts,) scores before the activation.

        Raises:
            EngineError: a result is not finite.
        """
        padded = PaddedBatch.of(batch)
        hidden = yield from self.network.passes(padded)
        result: Vectors = np.array(self.head(hidden, padded).astype(mx.float32))
        if not np.isfinite(result).all():
            raise EngineError(
                f"{self.entry.id} computed numbers that are not finite; a wider type may help: dtype float32"
            )
        return result

    def activate(self, raw: Vectors) -> Vectors:
        """Scores as the model's files want them, by default between 0 and 1; vectors stay as they are."""
        if not self.sigmoid:
            return raw
        scores: Vectors = (0.5 + 0.5 * np.tanh(0.5 * raw)).astype(np.float32)
        return scores

    def batch_bytes(self, rows: int, length: int) -> int:
        """What computing a batch of so many texts of so many tokens takes beside the weights, about."""
        return self.network.batch_bytes(rows, length)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What the small files say, before any weight is read."""

    entry: ModelEntry
    config: Config
    recipe: Recipe
    tokenizer: Any
    limit_bytes: int
    dtype: str

    @property
    def is_encoder(self) -> bool:
        return self.entry.architecture in HERE

    @property
    def is_reranker(self) -> bool:
        return self.entry.kind == "rerank"


def load_encoder(entry: ModelEntry, *, limit_bytes: int, dtype: str = "auto") -> LoadedEncoder:
    """Read an embedding model's or a reranker's files into memory. Engine thread only; takes seconds.

    Args:
        dtype: As in ``Settings``.

    Raises:
        UnusableModelError: the files are damaged, or ask for something that is not known here; both by name.
        OutOfMemoryError: it does not fit.
    """
    failure: LabError
    try:
        return _load(entry, limit_bytes=limit_bytes, dtype=dtype)
    except OutOfMemoryError as exc:
        failure = OutOfMemoryError(f"{entry.id} does not fit in memory: {exc.message}")
    except LabError as exc:
        failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {exc.message}", param="model")
    except Exception as exc:
        what = f"{type(exc).__name__}: {exc}"
        if memory.is_out_of_memory(exc):
            failure = OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB allowed): {exc}")
        else:
            failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
    # Not from the exception: its frames hold weights.
    memory.release()
    raise failure


def _load(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> LoadedEncoder:
    before = memory.used_bytes()
    _require(entry.size_bytes, limit_bytes)
    # The tokenizer before the weights: most that goes wrong goes wrong there, and it is small.
    plan = Plan(
        entry=entry,
        config=Config(read_json(entry.path / "config.json")),
        recipe=read_recipe(entry.path),
        tokenizer=without_word_cache(tokenizer_utils.load(entry.path)),
        limit_bytes=limit_bytes,
        dtype=dtype,
    )
    _check_known(plan)
    pairs = _pair_form(plan) if plan.is_reranker else None
    network, head = _encoder(plan) if plan.is_encoder else _decoder(plan)
    dimensions: int | None = None
    if head is None:
        head, dimensions = _pooled(plan, network)
    context = _context_length(plan, network)
    pooling = plan.recipe.pooling
    rules = TextRules(
        context_length=context,
        vocabulary_size=network.vocabulary_size,
        segments=_has_segments(plan, network),
        include_prompt=pooling is None or pooling.include_prompt,
        prompts=plan.recipe.prompts,
        lower_case=plan.recipe.lower_case,
        pairs=pairs,
    )
    decoder_method: RerankMethod = "cross-encoder" if plan.is_encoder else "decoder"
    return LoadedEncoder(
        entry=entry,
        memory_bytes=max(0, memory.used_bytes() - before),
        context_length=context,
        dimensions=None if plan.is_reranker else dimensions,
        method=decoder_method if plan.is_reranker else "cosine",
        texts=TextTokenizer(plan.tokenizer, entry.id, rules),
        network=network,
        head=head,
        sigmoid=plan.is_reranker and plan.recipe.activation == "sigmoid",
    )


def _require(needed_bytes: int, limit_bytes: int) -> None:
    if needed_bytes > limit_bytes:
        raise OutOfMemoryError(
            f"its weights take {needed_bytes / 1e9:.2f} GB, {limit_bytes / 1e9:.2f} GB are allowed; choose a smaller "
            "model, or raise memory_limit_bytes"
        )


def _check_known(plan: Plan) -> None:
    kind = plan.entry.architecture
    if not plan.is_encoder and kind.replace("_", "-") in {name.replace("_", "-") for name in ENCODERS}:
        raise UnusableModelError(f"encoders of type {kind} are not known here; known are {', '.join(sorted(HERE))}")
    if plan.recipe.chat is not None and not plan.is_reranker:
        raise UnusableModelError("its texts go through a chat template; that is known here for rerankers only")


def _encoder(plan: Plan) -> tuple[Network, Head | None]:
    """The network, and the head of a classifier; None where pooling and modules do its work."""
    part = modernbert if plan.entry.architecture == "modernbert" else bert
    wanted = DTYPES.get(plan.dtype, mx.float32 if on_cpu() else None)
    tensors = Tensors.read(plan.entry.path, wanted, part.rename, part.IGNORED)
    quantization = plan.config.values.get("quantization")
    if isinstance(quantization, dict):
        tensors.expand(Config(quantization).size("bits"), Config(quantization).size("group_size"))
    _require(tensors.nbytes, plan.limit_bytes)
    classifies = plan.is_reranker and plan.recipe.pooling is None
    network: Network
    head: Head | None = None
    if plan.entry.architecture == "modernbert":
        network = ModernBert.take(tensors, plan.config)
        head = ModernBertHead.take(tensors, plan.config) if classifies else None
    else:
        network = Bert.take(tensors, plan.config)
        roberta = plan.entry.architecture in bert.ROBERTAS
        head = FirstTokenHead.take(tensors, network.hidden_size, roberta=roberta) if classifies else None
    tensors.finish()
    return network, head


def _decoder(plan: Plan) -> tuple[Network, Head | None]:
    """As ``_encoder``, from mlx-lm's architectures."""
    path, config, limit, dtype = plan.entry.path, plan.config, plan.limit_bytes, plan.dtype
    if not plan.is_reranker or plan.recipe.pooling is not None:
        return read_decoder(path, config, limit_bytes=limit, dtype=dtype), None
    heads = config.values.get("architectures") or []
    if any(str(name).endswith("ForSequenceClassification") for name in heads):
        return read_classifier(path, config, limit_bytes=limit, dtype=dtype)
    tokens = plan.recipe.logit_tokens or _yes_and_no(plan)
    return read_logit_reranker(path, config, tokens, limit_bytes=limit, dtype=dtype)


def _yes_and_no(plan: Plan) -> LogitTokens:
    """The answers of Qwen3-Reranker as it was published, without files of sentence-transformers'."""
    if plan.entry.architecture != "qwen3":
        raise UnusableModelError(
            "its files do not say how it ranks: there is neither a LogitScore module nor a classifier's head"
        )
    true, false = (plan.tokenizer.convert_tokens_to_ids(token) for token in ("yes", "no"))
    unknown = getattr(plan.tokenizer, "unk_token_id", None)
    if not isinstance(true, int) or not isinstance(false, int) or unknown in {true, false}:
        raise UnusableModelError("its tokenizer has no single tokens for yes and no")
    return LogitTokens(true=true, false=false)


def _pair_form(plan: Plan) -> PairForm | None:
    """How a pair becomes text. Files that do not say leave it to the chat template, if that knows the two roles."""
    if plan.recipe.chat is not None:
        return ChatPairs(plan.tokenizer, plan.recipe.chat, plan.entry.id)
    if plan.is_encoder or plan.recipe.plain:
        return None
    with contextlib.suppress(UnusableModelError):
        return ChatPairs(plan.tokenizer, ChatForm(system=plan.recipe.prompts.of(None)), plan.entry.id)
    as_published = not plan.recipe.listed and "Qwen3ForCausalLM" in (plan.config.values.get("architectures") or [])
    return QwenPairs() if as_published or "Qwen3-Reranker" in read_card(plan.entry.path) else None


def _pooled(plan: Plan, network: Network) -> tuple[Head, int]:
    """The head of pooling and modules, and how many numbers it leaves."""
    recipe = plan.recipe
    pooling, steps = recipe.pooling, recipe.steps
    if pooling is None:
        mode: PoolingMode = "mean" if plan.is_encoder else "lasttoken"
        log.warning("%s has no files about pooling: %s pooling, vectors of length 1", plan.entry.id, mode)
        pooling, steps = Pooling(modes=(mode,)), (*(step for step in steps if step != Normalize()), Normalize())
    width = len(pooling.modes) * network.hidden_size
    operations: list[Operation] = []
    for step in steps:
        act, width = operation(step, width)
        operations.append(act)
    if plan.is_reranker and width != 1:
        raise UnusableModelError(f"its modules leave {width} numbers; a reranker has one")
    return PooledHead(pooling, tuple(operations), score=plan.is_reranker), width


def _context_length(plan: Plan, network: Network) -> int | None:
    """The smallest limit of the model and its files; those of sentence-transformers go before the tokenizer's."""
    own = (
        getattr(plan.tokenizer, "model_max_length", None) if plan.recipe.max_tokens is None else plan.recipe.max_tokens
    )
    limits = [own, plan.entry.context_length, network.positions]
    return min((int(limit) for limit in limits if limit is not None and limit < NO_LIMIT_TOKENS), default=None)


def _has_segments(plan: Plan, network: Network) -> bool:
    """BERT's tokenizer tells segments apart, RoBERTa's does not, unless its files say so."""
    usual = ["token_type_ids"] if plan.entry.architecture == "bert" else []
    names = plan.tokenizer.init_kwargs.get("model_input_names") or usual
    return isinstance(network, Bert) and network.segments > 1 and "token_type_ids" in names
