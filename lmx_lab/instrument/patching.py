"""Show which values of a clean text restore the answer to a corrupt text (activation patching)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmx_lab.backend import Backend
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.instrument.traces import (
    Token,
    What,
    hook_list,
    position_list,
    token_label,
    token_name,
    traced_pair,
)
from lmx_lab.progress import counter
from lmx_lab.results.figures import HeatMap, Picture
from lmx_lab.results.frames import make_table
from lmx_lab.values.tracing import Trace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    **{"hook": "str", "block": "int64", "head": "Int64", "position": "Int64", "token": "str"},
    **{"answer": "float32", "other": "float32", "difference": "float32", "restored": "float32"},
}
NO_DIFFERENCE = "the logit difference is the same after both texts"


class PatchSweep(Picture):
    """The logits of two tokens after the corrupt text, with one value at a time replaced by that of the clean text.

    Attributes:
        hooks: Name of each replaced value, in the order of the model. A hook with heads is listed once for each head.
        heads: Index of the head of each replaced value; None for values without heads.
        positions: The positions at which values were replaced.
        together: Whether each value was replaced at all these positions together.
        texts: Text of each token of the corrupt text.
        logits: Logits of ``answer`` and ``other``, of shape (values, positions, 2), or (values, 1, 2) with
            ``together``; NaN for values that an interrupted sweep did not compute.
        clean, corrupt: The logit of ``answer`` minus that of ``other`` after each text, without replaced values.
        interrupted: Whether the sweep was interrupted.

    Args:
        first: The result of the first request.
        positions: All positions; by default those of ``first``.
    """

    def __init__(self, first: Trace, positions: Sequence[int] | None = None, *, together: bool = False) -> None:
        details = first.details
        self.model, self.texts = first.model, first.texts
        self.hooks: tuple[str, ...] = tuple(details["names"])
        self.heads: tuple[int | None, ...] = tuple(details["heads"])
        self.positions: tuple[int, ...] = tuple(details["positions"] if positions is None else positions)
        self.together = together
        self.clean, self.corrupt = (float(details[name][0] - details[name][1]) for name in ("clean", "corrupt"))
        shape = (len(self.hooks), 1 if together else len(self.positions), 2)
        self.logits: NDArray[np.float32] = np.full(shape, np.nan, np.float32)
        self.interrupted = False
        self.add(first)

    def add(self, trace: Trace) -> None:
        """Add the results of some positions."""
        if self.together:
            self.logits[:] = trace.arrays["logits"]
            return
        for at, position in enumerate(trace.details["positions"]):
            self.logits[:, np.equal(self.positions, position)] = trace.arrays["logits"][:, at, None]

    @property
    def differences(self) -> NDArray[np.float32]:
        """The logit of ``answer`` minus that of ``other``, of shape (values, positions), or (values, 1)."""
        return self.logits[..., 0] - self.logits[..., 1]

    @property
    def restored(self) -> NDArray[np.float32]:
        """The fraction of the difference between the clean and the corrupt text that each value restores: 1 if the
        logit difference is that of the clean text, 0 if it is unchanged. NaN for values that an interrupted sweep did
        not compute, and for all values if the logit difference is the same after both texts.
        """
        span = self.clean - self.corrupt
        return (self.differences - self.corrupt) / np.float32(span if span else np.nan)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each value and position. ``head`` is missing for values without heads, and
        ``position`` and ``token`` if values were replaced at several positions together.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        values, places = (axis.ravel() for axis in np.indices(self.logits.shape[:2]))
        positions = [None if self.together else self.positions[at] for at in places]
        columns: Mapping[str, Any] = dict(
            zip(
                COLUMNS,
                (
                    [self.hooks[at] for at in values],
                    [int(self._block(int(at))) for at in values],
                    [self.heads[at] for at in values],
                    positions,
                    [None if at is None else self.texts[at] for at in positions],
                    self.logits[..., 0].ravel(),
                    self.logits[..., 1].ravel(),
                    self.differences.ravel(),
                    self.restored.ravel(),
                ),
                strict=True,
            )
        )
        frame = make_table(columns, COLUMNS)
        frame.attrs["interrupted"] = self.interrupted
        return frame

    def heat_map(self, hook: str | None = None, position: int | None = None) -> HeatMap:
        """Return the heat map of the restored fractions, with the last block on top. It has one column for each
        position, or one for each head if the values have heads.

        Args:
            hook: The last part of the names, such as ``hook_resid_post``; by default that of the first hook.
            position: One of ``positions``, for values with heads; negative ones count from the end of the text. By
                default the last of them in the text.

        Raises:
            InvalidRequestError: no value with this name was replaced, or none at this position.
        """
        kinds = self._kinds()
        hook = hook or kinds[0]
        if hook not in kinds:
            raise InvalidRequestError(f"hook is {hook!r:.40}; this sweep replaced {', '.join(kinds)}", param="hook")
        found = [at for at, name in enumerate(self.hooks) if name.endswith(f".{hook}")]
        places = [self._label(place) for place in range(self.logits.shape[1])]
        if self.heads[found[0]] is None:
            cells = {self._block(at): [(at, place) for place in range(len(places))] for at in found}
            return self._map(hook, cells, places, "token of the corrupt text")
        place = 0
        if not self.together:
            at = max(self.positions) if position is None else position
            at = at + len(self.texts) if at < 0 else at
            if at not in self.positions:
                raise InvalidRequestError(
                    f"position is {position}, at which no value was replaced; .positions has those with values",
                    param="position",
                )
            place = self.positions.index(at)
        by_head: dict[str, list[tuple[int, int]]] = {}
        for at in found:
            by_head.setdefault(self._block(at), []).append((at, place))
        heads = max(len(row) for row in by_head.values())
        return self._map(f"{hook} at {places[place]}", by_head, [str(head) for head in range(heads)], "head")

    def _map(
        self, what: str, cells: Mapping[str, Sequence[tuple[int, int]]], columns: Sequence[str], column_axis: str
    ) -> HeatMap:
        """Return a heat map.

        Args:
            cells: The indices of the values and places in the row of each block, by the name of the block.
        """
        restored, blocks = self.restored, [*cells][::-1]

        def describe(row: int, column: int) -> str:
            at, place = cells[blocks[row]][column]
            head = "" if self.heads[at] is None else f", head {self.heads[at]},"
            difference, share = self.differences[at, place], restored[at, place]
            return f"{self.hooks[at]}{head} at {self._label(place)}: difference {difference:.3f}, restored {share:.1%}"

        return HeatMap(
            title=f"Restored logit difference by {what}, {self.model}",
            values=[[float(restored[cell]) for cell in cells[block]] for block in blocks],
            rows=blocks,
            columns=columns,
            row_axis="block",
            column_axis=column_axis,
            describe=describe,
            unit="restored fraction (1: clean, 0: corrupt)",
            cell=(30.0, 12.0),
        )

    def _block(self, at: int) -> str:
        return self.hooks[at].split(".")[1]

    def _label(self, place: int) -> str:
        """Return the label of a column of ``logits``."""
        if self.together:
            return counted(len(self.positions), "position")
        return token_label(self.texts[self.positions[place]])

    def __repr__(self) -> str:
        done = int(np.isfinite(self.logits[..., 0]).sum())
        state = ", interrupted" if self.interrupted else ""
        if self.clean == self.corrupt:
            state += f"; nothing can be restored, because {NO_DIFFERENCE}"
        return (
            f"<PatchSweep of {self.model}: {done} of {counted(self.logits[..., 0].size, 'value')} replaced{state}; "
            f"logit difference {self.clean:.3f} clean, {self.corrupt:.3f} corrupt; .df contains all values>"
        )

    def _repr_html_(self) -> str:
        note = "<div>The sweep was interrupted; grey cells are missing.</div>" if self.interrupted else ""
        if self.clean == self.corrupt:
            note += f"<div>Nothing can be restored, because {NO_DIFFERENCE}.</div>"
        maps = list[HeatMap]()
        for hook in self._kinds():
            by_position = not self.together and hook == "hook_z"
            # The others are not displayed, because each has a heat map.
            shown = self.positions[-8:] if by_position else (None,)
            maps += [self.heat_map(hook, position) for position in shown]
            if by_position and len(shown) < len(self.positions):
                note += (
                    f"<div>The last {len(shown)} positions are shown; .heat_map({hook!r}, position) shows others.</div>"
                )
        return "".join(shown.svg() for shown in maps) + note

    def _kinds(self) -> list[str]:
        """Return the last parts of the names, without duplicates."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.hooks))


async def patch(
    backend: Backend,
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
        whole = await on_loop(backend.portal, text.run(backend, {**fields, "positions": wanted, "together": together}))
        return PatchSweep(whole, together=True)
    first = await on_loop(
        backend.portal, text.run(backend, {**fields, "positions": [-1] if wanted is None else wanted[:1]})
    )
    count = len(first.tokens)
    wrong = next((at for at in wanted or () if not -count <= at < count), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"positions contains {wrong}; the text has {counted(count, 'token')}, at the positions 0 to {count - 1}",
            param="positions",
        )
    # Negative positions count from the end.
    sweep = PatchSweep(first, list(range(count)) if wanted is None else [at % count for at in wanted])
    computed = dict.fromkeys(sweep.positions)
    left = [at for at in computed if at not in first.details["positions"]]
    values, total, size = len(sweep.hooks), len(computed), 1
    label = f"{counted(values, 'value')} at each position"
    with counter("patch", backend) as bar:
        try:
            while left:
                bar.show(label, values * (total - len(left)), values * total)
                started = time.monotonic()
                some, left = left[:size], left[size:]
                sweep.add(await on_loop(backend.portal, text.run(backend, {**fields, "positions": some})))
                # Each request computes both texts, so fewer requests are faster. One takes about 1 s, after which the
                # progress is shown.
                size = max(1, min(4 * size, int(size / max(time.monotonic() - started, 1e-3))))
            bar.show(label, values * total, values * total)
        except KeyboardInterrupt:
            sweep.interrupted = True
    return sweep
