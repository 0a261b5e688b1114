"""Show how probable each token of an answer was, and which tokens the model could have chosen instead."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for
from lmx_lab.instrument.access import LabAccess
from lmx_lab.values.generation import TokenLogprob

if TYPE_CHECKING:
    import pandas as pd

ColorBy = Literal["probability", "entropy", "rank"]
COLUMNS = ("position", "token", "id", "bytes", "logprob", "entropy", "rank", "alternatives", "logprob_tokens")
ALTERNATIVES = 5
"""Number of alternatives that a scoring pass reports for each token."""
ASK = "send the request with logprobs"
SHOWN_TOKENS = 4000
"""Maximum number of tokens in the display; a data frame has all of them."""
STEPS = 5
"""Number of colours, from tokens that the model expected to those that surprised it."""
COLORS = ("#1a9850", "#91cf60", "#d9d93b", "#fc8d59", "#d73027")
ALPHA = "55"
"""Opacity of the colours, so that text is readable on them in light and dark themes."""
LIMITS: Mapping[ColorBy, Sequence[float]] = {
    "probability": (0.9, 0.5, 0.2, 0.05),
    "entropy": (0.5, 1.5, 3.0, 5.0),
    "rank": (1, 2, 5, 20),
}
"""The last value of each colour but the last one; probabilities descend, entropies and ranks ascend."""
VISIBLE = str.maketrans({"\n": "⏎\n", "\t": "⇥\t", " ": "·", "\r": "␍"})


class TokenLens(Sequence[TokenLogprob]):
    """The tokens of an answer with their probabilities. In a notebook it is displayed as coloured text.

    Args:
        source: Where the log-probabilities come from: ``answer`` if they were requested with it, ``scoring`` if they
            were computed afterwards from the same tokens, without penalties and biases.
        color: What selects the colours in the display.
    """

    def __init__(
        self, tokens: Sequence[TokenLogprob], *, source: Literal["answer", "scoring"], color: ColorBy = "probability"
    ) -> None:
        if color not in LIMITS:
            raise InvalidRequestError(f"color is {color!r:.80}; it must be one of {', '.join(LIMITS)}", param="color")
        self._tokens = tuple(tokens)
        self.source = source
        self.color: ColorBy = color

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprob, ...]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprob | tuple[TokenLogprob, ...]:
        return self._tokens[at]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole answer: the sum of those of its tokens."""
        return sum(token.logprob for token in self._tokens if token.logprob is not None)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each token.

        Its columns are the position in the answer, the text, the id, the bytes, the natural log-probability, the
        entropy of the distribution in nats, the rank (1 is the most likely token), and the alternatives and the tokens
        that the request names, as dictionaries from text to log-probability. Entropy and rank are missing where the
        engine does not report them.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [
            (
                at,
                each.text,
                each.token,
                each.bytes,
                each.logprob,
                each.entropy,
                rank_of(each),
                by_text(each.top),
                by_text(each.named),
            )
            for at, each in enumerate(self._tokens)
        ]
        frame: pd.DataFrame = pandas_for("df").DataFrame(rows, columns=list(COLUMNS))
        return frame.astype({"rank": "Int64", "id": "Int64", "logprob": "float64", "entropy": "float64"})

    def __repr__(self) -> str:
        text = "".join(token.text for token in self._tokens)
        short = text if len(text) <= 60 else f"{text[:60]}…"
        return f"<TokenLens of {len(self)} tokens, log-probability {self.logprob:.3f}: {short!r}; .df has all figures>"

    def _repr_html_(self) -> str:
        shown = self._tokens[:SHOWN_TOKENS]
        more = f"<div>{len(self) - len(shown)} more tokens: see .df</div>" if len(self) > len(shown) else ""
        spans = "".join(_span(token, self.color) for token in shown)
        style = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
        return f"{_legend(self.color)}<div style='{style}'>{spans}</div>{more}"


def rank_of(token: TokenLogprob) -> int | None:
    """Return the rank of a token, from 1; without a report of the engine, its position among the alternatives."""
    if token.rank is not None:
        return token.rank
    same = (token.token,) if token.token is not None else (None, token.bytes)
    keys = ((other.token,) if other.token is not None else (None, other.bytes) for other in token.top)
    return next((at for at, key in enumerate(keys, 1) if key == same), None)


def by_text(tokens: Sequence[TokenLogprob]) -> dict[str, float | None]:
    """Return the log-probabilities of tokens by their text."""
    return {token.text: token.logprob for token in tokens}


def _value(token: TokenLogprob, color: ColorBy) -> float | None:
    if color == "entropy":
        return token.entropy
    if color == "rank":
        return rank_of(token)
    return None if token.logprob is None else math.exp(token.logprob)


def _step(value: float, color: ColorBy) -> int:
    """Return the number of a value's colour."""
    limits = LIMITS[color]
    return sum(value < limit if color == "probability" else value > limit for limit in limits)


def _span(token: TokenLogprob, color: ColorBy) -> str:
    value = _value(token, color)
    background = f"background:{COLORS[_step(value, color)]}{ALPHA};" if value is not None else ""
    text = html.escape(token.text.translate(VISIBLE))
    return f"<span style='{background}border-radius:2px' title='{html.escape(_title(token), quote=True)}'>{text}</span>"


def _title(token: TokenLogprob) -> str:
    """Return the text that is shown while the mouse is over a token."""
    lines = [f"{token.text!r}" + (f", id {token.token}" if token.token is not None else "")]
    if token.logprob is not None:
        lines.append(f"probability {math.exp(token.logprob):.2%}, logprob {token.logprob:.4f}")
    if token.entropy is not None:
        lines.append(f"entropy {token.entropy:.3f}")
    if (rank := rank_of(token)) is not None:
        lines.append(f"rank {rank}")
    lines += [f"{math.exp(other.logprob):7.2%}  {other.text!r}" for other in token.top if other.logprob is not None]
    return "\n".join(lines)


def _legend(color: ColorBy) -> str:
    sign = "≥" if color == "probability" else "≤"
    names = [f"{sign} {limit:g}" for limit in LIMITS[color]]
    names.append(f"{'<' if color == 'probability' else '>'} {LIMITS[color][-1]:g}")
    chips = " ".join(
        f"<span style='background:{colour}{ALPHA};padding:0 4px'>{html.escape(name)}</span>"
        for colour, name in zip(COLORS, names, strict=True)
    )
    return f"<div><small>{color}: {chips}</small></div>"


def lens_of(
    lab: LabAccess | None, prompt: Sequence[int], answer: Sequence[int], *, model: str, color: ColorBy
) -> TokenLens:
    """Return the lens of an answer whose log-probabilities are computed now, from the tokens alone.

    Args:
        lab: The lab that scores; None if there is none.
        answer: Token ids of the answer; empty if they are not known.

    Raises:
        NotLoadedError: another model is loaded.
        InvalidRequestError: the tokens cannot be scored.
    """
    if lab is None:
        raise InvalidRequestError(f"there are no log-probabilities, and no lab that can score the tokens; {ASK}")
    if not (prompt and answer):
        raise InvalidRequestError(f"the ids of this answer's tokens are not known, so they cannot be scored; {ASK}")

    how: dict[str, Any] = {"top": ALTERNATIVES, "start": len(prompt), "distributions": color == "entropy"}
    tokens = lab.run(lambda backend: backend.score([*prompt, *answer], model=model, **how))
    return TokenLens(tokens, source="scoring", color=color)
