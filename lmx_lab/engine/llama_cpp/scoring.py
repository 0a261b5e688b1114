"""Score the tokens of a prompt with llama.cpp, whose server reports log-probabilities of generated tokens only.

A separate process (``score_worker``) computes them, so that the tokens of a prompt are computed together and a crash
does not end answers. It maps the weights from the same file. It is started for the first prompt, and ended after
``IDLE_S`` without use.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.memory_plan import ContextPlan
from lmx_lab.engine.llama_cpp.process import LlamaProcess, llama_environ
from lmx_lab.engine.llama_cpp.tokenizer import LlamaTokenizer
from lmx_lab.engine.memory import Budget
from lmx_lab.errors import EngineError, UnusableModelError
from lmx_lab.values.outputs import PromptScores, TokenLogprob, token_text
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import require_unchanged

PROGRAM = ("-m", "lmx_lab.engine.llama_cpp.score_worker")
IDLE_S = 60.0
"""Time after which a process that is not used is ended."""
MIN_TOKENS = 1024
"""Smallest length of a context. A longer prompt gets a context of twice the length, as long as the model allows it."""
KEYS, BFLOAT16 = 1, 30
"""The types of keys and values (``ggml_type``), unless the cache of the model is quantized. As with
``INVARIANT_ATTENTION``, the scores then do not depend on how the tokens are divided into steps. Compared with MLX in
float32, they differ by 0.24 nats at most, and by 0.35 with float16 values (511 tokens of SmolLM2-135M, Q4_1)."""
EXTRA_BYTES = 2**30
"""Memory that the process may use beyond the weights and the cache, mostly for logits."""


class LlamaScorer:
    """Scores the prompts of one model, one after the other. Belongs to the manager's loop.

    Args:
        fields: The parameters of the model's process, see ``CommonParams``.
        budget: The memory that models may use.
    """

    def __init__(self, tokenizer: LlamaTokenizer, plan: ContextPlan, fields: Mapping[str, Any], budget: Budget) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._fields = fields
        self._budget = budget
        self._scoring = asyncio.Lock()
        self._process: LlamaProcess | None = None
        self._tokens = 0
        """Length of the context of the process."""
        self._scope: str | None = None
        """The scope of the prompt whose tokens are in the context."""
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        """Ends a process that is not used."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the process without the weights, which it maps from the file."""
        return self._process.own_bytes if self._process is not None else 0

    async def score(
        self, prompt: Sequence[int], *, scope: str, top: int, start: int, progress: Callable[[int], None]
    ) -> PromptScores:
        """Return the log-probability of each token of a prompt, its rank, the entropy, and ``top`` alternatives.

        Args:
            scope: The scope in which the prefix of a scored prompt may be used again.
            start: Position of the first token that is scored. The tokens before it, and the first one, have no score.
            progress: Called with the number of tokens that were scored so far.

        Raises:
            OutOfMemoryError: there is too little memory for another context, or memory ran out during its start.
            UnusableModelError: the file has changed.
            EngineError: the process ended, or could not be started.
        """
        table = await self._tokenizer.load_token_table()
        scores = [_entry(table, token, None) for token in prompt[: max(1, start)]]
        if len(scores) >= len(prompt):
            return PromptScores(tokens=tuple(scores))
        async with self._scoring:
            process = await self._started(len(prompt))
            fresh, self._scope = scope != self._scope, scope
            try:
                await process.send({"tokens": list(prompt), "start": start, "top": top, "fresh": fresh})
                while len(scores) < len(prompt):
                    if (answer := await process.receive()) is None:
                        await asyncio.wait_for(process.died.wait(), 5.0)
                        raise EngineError(f"llama.cpp did not score the prompt: {process.reason()}; try again")
                    for logprob, rank, entropy, alternatives in answer["scores"]:
                        others = tuple(_entry(table, token, value) for token, value in alternatives)
                        token = prompt[len(scores)]
                        scores.append(_entry(table, token, logprob, top=others, rank=rank, entropy=entropy))
                    progress(answer["done"])
            except BaseException:
                # The rest of its answers would be taken for those of the next prompt.
                await self.close()
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
        return PromptScores(tokens=tuple(scores))

    async def _started(self, tokens: int) -> LlamaProcess:
        """Return the process, with a context of at least this number of tokens."""
        if self._idle is not None:
            self._idle.cancel()
        # The memory of a process that was killed is released before ``died`` is set.
        if self._process is not None and self._process.own_bytes and tokens <= self._tokens:
            return self._process
        await self.close()
        entry, fields = self._tokenizer.entry, self._fields
        self._tokens = max(tokens, min(self._plan.context_length, max(MIN_TOKENS, 2 * tokens)))
        cache_bytes = self._tokens * self._plan.token_bytes
        await in_thread(functools.partial(require_unchanged, entry))
        self._budget.require_free(cache_bytes, f"another context of {entry.id}")
        try:
            self._process = await LlamaProcess.start(
                entry.path,
                {
                    "tokens": self._tokens,
                    "threads": fields["cpuparams.n_threads"],
                    "step_tokens": fields["n_ubatch"],
                    "cache_types": [fields.get("cache_type_k", KEYS), fields.get("cache_type_v", BFLOAT16)],
                },
                environ=llama_environ(os.environ, fields["cpuparams.n_threads"]),
                max_bytes=entry.load_bytes + cache_bytes + EXTRA_BYTES,
                free_bytes=lambda: self._budget.machine_free_bytes,
                program=PROGRAM,
            )
        except UnusableModelError as exc:
            # The model is loaded and can answer, so the request was not invalid.
            raise EngineError(f"llama.cpp did not score the prompt: {exc.message}; try again") from exc
        return self._process

    def _end_idle(self) -> None:
        # Forgotten immediately, so that a prompt that arrives before the process has ended starts another one.
        if self._process is not None and not self._scoring.locked():
            process, self._process, self._scope = self._process, None, None
            self._ending = asyncio.create_task(process.stop(), name="lmx-lab ends the scoring of llama.cpp")

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process, self._scope = self._process, None, None
        if self._idle is not None:
            self._idle.cancel()
        if process is not None:
            await process.stop()
        if self._ending is not None:
            await self._ending


def _entry(table: TokenTable, token: int, logprob: float | None, **known: Any) -> TokenLogprob:
    data = table.tokens[token]
    return TokenLogprob(token=token, text=token_text(data), bytes=data, logprob=logprob, **known)
