"""Compare an answer that was generated again with the recorded one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lmx_lab.frames import Dtype, make_table
from lmx_lab.values.recording import Provenance, Record

if TYPE_CHECKING:
    import pandas as pd

HASHES = ("weights", "template")
"""Fields of a provenance that are compared only if both are known."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay:
    """A recorded answer, and the answer to the same request now."""

    recorded: Record
    replayed: Record

    @property
    def unit(self) -> str:
        """The unit of comparison: ``token``, or ``character`` if the token ids of an answer are not known."""
        known = self.recorded.answer is not None and self.replayed.answer is not None
        return "token" if known else "character"

    @property
    def first_difference(self) -> int | None:
        """Position of the first token, or character, that differs; None if there is none.

        It is the length of the shorter answer if the longer one begins with it.
        """
        pairs = itertools.zip_longest(*self._sides)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), None)

    @property
    def same(self) -> bool:
        """Whether both answers are the same."""
        return self.first_difference is None

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Differences between the computations of the answers, with the recorded and the present value: fields of the
        provenance, such as the version of the engine, and ``prompt`` if the chat template renders other tokens.
        """
        before, now = self.recorded.provenance, self.replayed.provenance
        names = [each.name for each in fields(Provenance)]
        pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
        differing = {
            name: pair for name, pair in pairs.items() if pair[0] != pair[1] and (name not in HASHES or all(pair))
        }
        prompts = self.recorded.prompt, self.replayed.prompt
        return differing | ({"prompt": prompts} if prompts[0] != prompts[1] else {})

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each position: the id of the token, or the character, in both answers.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        pairs = itertools.zip_longest(*self._sides)
        rows = [(at, one, other, one == other) for at, (one, other) in enumerate(pairs)]
        side: Dtype = "Int64" if self.unit == "token" else "str"
        frame: pd.DataFrame = make_table(
            rows, {"position": "int64", "recorded": side, "replayed": side, "same": "bool"}
        )
        return frame

    @property
    def _sides(self) -> tuple[Sequence[Any], Sequence[Any]]:
        before, now = self.recorded, self.replayed
        if before.answer is None or now.answer is None:
            return before.reasoning + before.text, now.reasoning + now.text
        return before.answer, now.answer

    def __repr__(self) -> str:
        lengths = " and ".join(str(len(side)) for side in self._sides)
        result = "the same" if self.same else f"first difference at {self.unit} {self.first_difference}"
        changed = f"; changed: {', '.join(self.changed)}" if self.changed else ""
        return f"<Replay: {result}, of {lengths} {self.unit}s{changed}>"
