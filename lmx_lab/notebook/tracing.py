"""Define the methods of a lab that inspect the model: activations, logit lens, attention, patching, attribution."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmx_lab.backend import HasBackend
from lmx_lab.blocking import both, in_thread, on_loop
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.attention import AttentionPattern
from lmx_lab.instrument.attribution import LogitAttribution
from lmx_lab.instrument.logit_lens import LogitLensTable
from lmx_lab.instrument.patching import PatchSweep
from lmx_lab.instrument.traces import (
    ActivationCache,
    HookTable,
    What,
    activation_fields,
    hook_list,
    integer,
    position_list,
    token_name,
    trace_body,
    traced,
    traced_pair,
)
from lmx_lab.progress import counter

Token = int | str
STEP_S = 1.0
"""Time between two updates of the progress of a sweep."""


class TraceVerbs:
    """The methods of ``Lab`` that inspect the model.

    The text of a trace is read in another thread, because a recorded request reads its answer from the recording.
    """

    async def _hooks(self: HasBackend) -> HookTable:
        """Return the names of the values that can be read while the loaded model computes, with their shapes.

        The names are those of TransformerLens.

        Raises:
            NotLoadedError: no model is loaded.
            InvalidRequestError: the model does not run on MLX, or has no list of blocks.
            AdminForbiddenError: the server runs on another machine.
        """
        return HookTable(await on_loop(self._portal, self._backend.trace(trace_body({"kind": "hooks"}))))

    hooks, ahooks = both(_hooks)

    async def _trace(
        self: HasBackend, what: What, hooks: str | Sequence[str], *, positions: int | Sequence[int] | None = None
    ) -> ActivationCache:
        """Compute a text, and return the values of hooks at its positions as float32 arrays.

        The text is computed again from its tokens, between the steps of running answers, which are not affected.

        Args:
            what: A text, messages, token ids, a reply or a recorded request. A reply is traced together with its
                prompt.
            hooks: Names from ``hooks()``, in which ``*`` stands for any characters, such as
                ``blocks.*.hook_resid_post``.
            positions: The positions whose values are returned, by default all; negative ones count from the end.

        Raises:
            NotLoadedError: no model is loaded, or not the model of the answer.
            InvalidRequestError: a hook or position does not exist, the values are larger than ``trace_bytes``, or the
                model does not run on MLX.
            ContextLengthError: the text is longer than the model's context.
            AdminForbiddenError: the server runs on another machine.
        """
        fields, text = activation_fields(hooks, positions), await in_thread(lambda: traced(what))
        return ActivationCache(await on_loop(self._portal, text.run(self._backend, fields)))

    trace, atrace = both(_trace)

    async def _logit_lens(
        self: HasBackend, what: What, *, top: int = 5, positions: int | Sequence[int] | None = None
    ) -> LogitLensTable:
        """Return the tokens that the model would predict after each of its blocks, at each position of a text.

        The final norm and the head of the model are applied to the residual stream after each block.

        Args:
            what: As in ``trace``.
            top: Number of tokens for each block and position, up to 100.
            positions: As in ``trace``.

        Raises:
            LabError: see ``trace``.
        """
        fields = {"kind": "logit_lens", "top": top, "positions": position_list(positions)}
        text = await in_thread(lambda: traced(what))
        return LogitLensTable(await on_loop(self._portal, text.run(self._backend, fields)))

    logit_lens, alogit_lens = both(_logit_lens)

    async def _attention(self: HasBackend, what: What, layer: int, head: int = 0) -> AttentionPattern:
        """Return how much each token of a text attends to the preceding tokens, in all heads of a block.

        Args:
            what: As in ``trace``.
            layer: Index of the block.
            head: Index of the head that is displayed large.

        Raises:
            LabError: see ``trace``.
        """
        block, shown = _index(layer, "layer"), _index(head, "head")
        fields = activation_fields(f"blocks.{block}.attn.hook_pattern", None)
        text = await in_thread(lambda: traced(what))
        found = await on_loop(self._portal, text.run(self._backend, fields))
        return AttentionPattern(found, layer=block, head=shown)

    attention, aattention = both(_attention)

    async def _direct_logit_attribution(
        self: HasBackend, what: What, token: Token, *, other: Token | None = None
    ) -> LogitAttribution:
        """Return the contribution of each block, and each of its attention heads, to the logit of the next token.

        Args:
            what: As in ``trace``.
            token: Id or text of the token, such as ``" Paris"``; a text must be exactly one token.
            other: If set, the logit of ``token`` minus that of ``other`` is decomposed.

        Raises:
            LabError: see ``trace``.
        """
        names = [token_name(token, "token"), *([] if other is None else [token_name(other, "other")])]
        fields = {"kind": "attribution", **dict(zip(("token", "other"), names, strict=False))}
        text = await in_thread(lambda: traced(what))
        found = await on_loop(self._portal, text.run(self._backend, fields))
        label = " minus ".join(map(repr, names))
        return LogitAttribution(found, label=label)

    direct_logit_attribution, adirect_logit_attribution = both(_direct_logit_attribution)

    async def _patch(
        self: HasBackend,
        clean: What,
        corrupt: What,
        *,
        answer: Token,
        other: Token,
        hooks: str | Sequence[str] = "blocks.*.hook_resid_post",
        positions: int | Sequence[int] | None = None,
        together: bool = False,
    ) -> PatchSweep:
        """Compute a corrupt text once for each value and position, with this value replaced by that of a clean text.
        The result contains the fraction of the difference between two logits that each replacement restores. For
        ``attn.hook_z``, the outputs of single heads are replaced.

        If ``patch`` is interrupted, it returns the positions that are complete; ``apatch`` is cancelled.

        Args:
            clean, corrupt: Texts with the same number of tokens, as ``what`` in ``trace``.
            answer: The token that the model predicts after the clean text: an id, or a text of exactly one token.
            other: The token that the model predicts after the corrupt text.
            hooks: Names that end with ``hook_resid_pre``, ``hook_resid_mid``, ``hook_resid_post``, ``hook_attn_out``,
                ``hook_mlp_out``, or ``attn.hook_z``, the outputs of single heads.
            positions: As in ``trace``.
            together: Whether each value is replaced at all positions at once, instead of at one after the other.

        Raises:
            InvalidRequestError: the texts have different numbers of tokens, or a hook cannot be patched.
            LabError: see ``trace``.
        """
        source, text = await in_thread(lambda: traced_pair(clean, corrupt))
        fields: dict[str, Any] = {
            "kind": "patching",
            "clean": source.text,
            "answer": token_name(answer, "answer"),
            "other": token_name(other, "other"),
            "hooks": hook_list(hooks),
        }
        wanted = position_list(positions)
        if together:
            whole = await on_loop(
                self._portal, text.run(self._backend, {**fields, "positions": wanted, "together": together})
            )
            return PatchSweep(whole, together=True)
        first = await on_loop(
            self._portal, text.run(self._backend, {**fields, "positions": [-1] if wanted is None else wanted[:1]})
        )
        count = len(first.tokens)
        wrong = next((at for at in wanted or () if not -count <= at < count), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"positions contains {wrong}; the text has {count} tokens, at the positions 0 to {count - 1}",
                param="positions",
            )
        # Positions are in ascending order, and negative ones count from the end.
        all_positions = list(range(count)) if wanted is None else sorted({at % count for at in wanted})
        sweep = PatchSweep(first, all_positions)
        left = [at for at in all_positions if at not in first.details["positions"]]
        values, total, size = len(sweep.hooks), len(sweep.positions), 1
        label = f"{values} values at each position"
        with counter("patch") as bar:
            try:
                while left:
                    bar.show(label, values * (total - len(left)), values * total)
                    started = time.monotonic()
                    some, left = left[:size], left[size:]
                    sweep.add(await on_loop(self._portal, text.run(self._backend, {**fields, "positions": some})))
                    # Each request computes both texts, so fewer requests are faster.
                    size = max(1, min(4 * size, int(size * STEP_S / max(time.monotonic() - started, 1e-3))))
                bar.show(label, values * total, values * total)
            except KeyboardInterrupt:
                sweep.interrupted = True
        return sweep

    patch, apatch = both(_patch)


def _index(value: object, name: str) -> int:
    """Return an index.

    Raises:
        InvalidRequestError: the value is not an integer, or is negative.
    """
    found = integer(value)
    if found is None or found < 0:
        raise InvalidRequestError(f"{name} is {value!r:.40}; it must be an index, 0 or more", param=name)
    return found
