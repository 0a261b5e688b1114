"""Show which values of a clean text restore the answer to a corrupt text (activation patching)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for
from lmx_lab.instrument.heatmap import HeatMap
from lmx_lab.instrument.traced_text import token_label
from lmx_lab.values.tracing import Trace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("hook", "block", "position", "token", "answer", "other", "difference", "restored")
NO_DIFFERENCE = "the logit difference is the same after both texts"


class PatchSweep:
    """The logits of two tokens after the corrupt text, with one value at a time replaced by that of the clean text.

    Attributes:
        hooks: Names of the replaced values, in the order of the model.
        positions: The positions at which values were replaced.
        texts: Text of each token of the corrupt text.
        logits: Logits of ``answer`` and ``other``, of shape (hooks, positions, 2); NaN where the sweep was interrupted.
        clean, corrupt: The logit of ``answer`` minus that of ``other`` after each text, without replaced values.
        interrupted: Whether the sweep was interrupted.
    """

    def __init__(self, first: Trace, positions: Sequence[int]) -> None:
        details = first.details
        self.model, self.texts = first.model, first.texts
        self.hooks: tuple[str, ...] = tuple(details["names"])
        self.positions = tuple(positions)
        self.clean, self.corrupt = (float(details[name][0] - details[name][1]) for name in ("clean", "corrupt"))
        self.logits: NDArray[np.float32] = np.full((len(self.hooks), len(positions), 2), np.nan, np.float32)
        self.interrupted = False
        self.add(first)

    def add(self, trace: Trace) -> None:
        """Add the results of some positions."""
        for at, position in enumerate(trace.details["positions"]):
            self.logits[:, self.positions.index(position)] = trace.arrays["logits"][:, at]

    @property
    def differences(self) -> NDArray[np.float32]:
        """The logit of ``answer`` minus that of ``other``, of shape (hooks, positions)."""
        return self.logits[..., 0] - self.logits[..., 1]

    @property
    def restored(self) -> NDArray[np.float32]:
        """The fraction of the difference between the clean and the corrupt text that each value restores: 1 if the
        logit difference is that of the clean text, 0 if it is unchanged. NaN where the sweep was interrupted, and
        everywhere if the logit difference is the same after both texts.
        """
        span = self.clean - self.corrupt
        return (self.differences - self.corrupt) / np.float32(span if span else np.nan)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each hook and position.

        Raises:
            ImportError: pandas is not installed.
        """
        hooks, places = (axis.ravel() for axis in np.indices(self.logits.shape[:2]))
        positions = np.array(self.positions)[places]
        columns: Mapping[str, Any] = dict(
            zip(
                COLUMNS,
                (
                    [self.hooks[at] for at in hooks],
                    [int(self.hooks[at].split(".")[1]) for at in hooks],
                    positions,
                    [self.texts[at] for at in positions],
                    self.logits[..., 0].ravel(),
                    self.logits[..., 1].ravel(),
                    self.differences.ravel(),
                    self.restored.ravel(),
                ),
                strict=True,
            )
        )
        frame: pd.DataFrame = pandas_for("df").DataFrame(columns)
        frame.attrs["interrupted"] = self.interrupted
        return frame

    def heat_map(self, hook: str | None = None) -> HeatMap:
        """Return the heat map of the restored fractions, with the last block on top.

        Args:
            hook: The last part of the names, such as ``hook_resid_post``; by default that of the first hook.

        Raises:
            InvalidRequestError: no value with this name was replaced.
        """
        kinds = self._kinds()
        hook = hook or kinds[0]
        if hook not in kinds:
            raise InvalidRequestError(f"hook is {hook!r:.40}; this sweep replaced {', '.join(kinds)}", param="hook")
        rows = [at for at, name in enumerate(self.hooks) if name.endswith(f".{hook}")][::-1]
        restored = self.restored

        def describe(row: int, column: int) -> str:
            name, at = self.hooks[rows[row]], self.positions[column]
            difference, share = self.differences[rows[row], column], restored[rows[row], column]
            return f"{name} at {self.texts[at]!r}: difference {difference:.3f}, restored {share:.1%}"

        return HeatMap(
            title=f"Restored logit difference by {hook}, {self.model}",
            values=[[float(value) for value in restored[at]] for at in rows],
            rows=[self.hooks[at].split(".")[1] for at in rows],
            columns=[token_label(self.texts[at]) for at in self.positions],
            row_axis="block",
            column_axis="token of the corrupt text",
            describe=describe,
            cell=(30.0, 12.0),
        )

    def __repr__(self) -> str:
        done = int(np.isfinite(self.logits[..., 0]).sum())
        state = ", interrupted" if self.interrupted else ""
        if self.clean == self.corrupt:
            state += f"; nothing can be restored, because {NO_DIFFERENCE}"
        return (
            f"<PatchSweep of {self.model}: {done} of {self.logits[..., 0].size} values replaced{state}; logit "
            f"difference {self.clean:.3f} clean, {self.corrupt:.3f} corrupt; .df contains all values>"
        )

    def _repr_html_(self) -> str:
        note = "<div>The sweep was interrupted; grey cells are missing.</div>" if self.interrupted else ""
        if self.clean == self.corrupt:
            note += f"<div>Nothing can be restored, because {NO_DIFFERENCE}.</div>"
        return "".join(self.heat_map(hook).svg() for hook in self._kinds()) + note

    def _kinds(self) -> list[str]:
        """Return the last parts of the names, without duplicates."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.hooks))
