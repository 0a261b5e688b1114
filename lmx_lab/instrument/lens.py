"""Show the probability of each token of an answer, and the alternatives at its position.

A ``TokenTable`` has the log-probabilities as rows, a ``TokenLens`` colours the tokens of the text.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.blocking import on_loop
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import PAGE_CSS, Displayed, page
from lmx_lab.results.tables import align_columns, html_table
from lmx_lab.sanitize import shorten
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.values.steering import recorded_steering

if TYPE_CHECKING:
    import pandas as pd

TABLE_COLUMNS = {"token": "str", "logprob": "float64", "probability": "float64", "alternatives": "object"}
SHOWN_ROWS = 40
"""Maximum number of tokens in the display of a ``TokenTable``."""
ColorBy = Literal["probability", "entropy", "rank"]
Part = Literal["text", "reasoning", "call"]
"""The part of an answer to which a token belongs."""
ALTERNATIVES = 5
"""Number of alternatives that a scoring pass returns for each token."""
ASK = "send the request with logprobs"
COLORS = ("#1a9850", "#91cf60", "#d9d93b", "#fc8d59", "#d73027")
"""Colours from expected to unexpected tokens."""
ALPHA = "55"
"""Opacity of the colours, which keeps text readable in light and dark themes."""
LIMITS: Mapping[ColorBy, Sequence[float]] = {
    "probability": (0.9, 0.5, 0.2, 0.05),
    "entropy": (0.5, 1.5, 3.0, 5.0),
    "rank": (1, 2, 5, 20),
}
"""The last value of each colour, except the last colour. Probabilities descend, entropies and ranks ascend."""
PART_STYLES: Mapping[Part, str] = {
    "text": "",
    "reasoning": "font-style:italic;border-bottom:1px dotted;",
    "call": "border-bottom:1px solid;",
}
TEXT_STYLE = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
STYLES = f"""\
{PAGE_CSS}main > span {{ position: relative; }}
main > span > span {{ display: none; position: absolute; z-index: 1; top: 1.5em; left: 0; width: 22em; padding: .5em;
  background: Canvas; color: CanvasText; border: 1px solid; font-style: normal; }}
main > span:is(:hover, :focus) > span {{ display: block; }}
main i {{ display: block; font-style: normal; }}
main b {{ display: inline-block; height: .7em; margin-right: .3em; background: #4575b4; }}
"""
"""The styles of a page in which the alternatives of a token are shown while it is selected."""
VISIBLE = str.maketrans({"\n": "⏎\n", "\t": "⇥\t", " ": "·", "\r": "␍"})


class TokenTable(Displayed, list[TokenLogprob]):
    """The tokens of an answer with their log-probabilities and alternatives; ``df`` is a data frame."""

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each token: its text, its natural log-probability, its probability from 0 to 1,
        and a dictionary of the most likely tokens at this position with their log-probabilities.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [
            (token.text, token.logprob, _probability(token), {other.text: other.logprob for other in token.top})
            for token in self
        ]
        return make_table(rows, TABLE_COLUMNS)

    def __repr__(self) -> str:
        rows = [tuple(TABLE_COLUMNS), *map(_cells, self[:SHOWN_ROWS])]
        return "\n".join([*align_columns(rows), *self._footer()])

    def _repr_html_(self) -> str:
        table = html_table(tuple(TABLE_COLUMNS), map(_cells, self[:SHOWN_ROWS]))
        return table + "".join(f"<div>{line}</div>" for line in self._footer())

    def _footer(self) -> list[str]:
        more = len(self) - SHOWN_ROWS
        return [f"{counted(more, 'more token')}: see .df"] if more > 0 else []


def _cells(token: TokenLogprob) -> tuple[str, ...]:
    others = ", ".join(f"{other.text!r} {_percent(other)}" for other in token.top if other.text != token.text)
    logprob = "" if token.logprob is None else f"{token.logprob:.3f}"
    return repr(token.text), logprob, _percent(token), others


def _percent(token: TokenLogprob) -> str:
    probability = _probability(token)
    return "" if probability is None else f"{probability:.1%}"


def _probability(token: TokenLogprob) -> float | None:
    return None if token.logprob is None else math.exp(token.logprob)


class TokenLens(TokenTable):
    """The tokens of an answer with their probabilities. Notebooks display them as coloured text.

    Args:
        source: The source of the log-probabilities: ``answer`` if they were requested with it, ``scoring`` if they
            were computed afterwards from the same tokens, without penalties and biases.
        color: Value that determines the colours of the display.
        parts: The part of the answer that each token belongs to: ``text``, ``reasoning`` or ``call``; empty if
            that is not known.
    """

    def __init__(
        self,
        tokens: Sequence[TokenLogprob],
        *,
        source: Literal["answer", "scoring"],
        color: ColorBy = "probability",
        parts: Sequence[Part] = (),
    ) -> None:
        if color not in LIMITS:
            raise InvalidRequestError(f"color is {color!r:.80}; it must be one of {', '.join(LIMITS)}", param="color")
        super().__init__(tokens)
        if source == "scoring" and color == "entropy" and all(token.entropy is None for token in self):
            raise InvalidRequestError("an attached lab has neither ranks nor entropies; color by probability")
        self.source = source
        self.color: ColorBy = color
        self.parts: Sequence[Part] = list(parts) or ["text"] * len(self)

    def colored(self, color: ColorBy) -> TokenLens:
        """Return the same tokens, coloured by another value."""
        return TokenLens(self, source=self.source, color=color, parts=self.parts)

    @property
    def logprob(self) -> float:
        """Log-probability of the whole answer: the sum over its tokens."""
        return sum(token.logprob for token in self if token.logprob is not None)

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each token.

        The columns are the position in the answer, the text, the id, the bytes, the natural log-probability, the
        entropy of the distribution in nats, the rank (1 is the most likely token), and the alternatives and the tokens
        that the request names, as dictionaries from text to log-probability. Entropy and rank are missing where the
        engine does not report them.

        Raises:
            MissingPackageError: pandas is not installed.
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
            for at, each in enumerate(self)
        ]
        return make_table(
            rows,
            {
                **{"position": "int64", "token": "str", "id": "Int64", "bytes": "object", "logprob": "float64"},
                **{"entropy": "float64", "rank": "Int64", "alternatives": "object", "logprob_tokens": "object"},
            },
        )

    def __repr__(self) -> str:
        short = shorten("".join(token.text for token in self), 60)
        return (
            f"<TokenLens of {counted(len(self), 'token')}, log-probability {self.logprob:.3f}: {short!r}; "
            ".df has all values>"
        )

    def _repr_html_(self) -> str:
        shown = self[:4000]  # The data frame contains all.
        more = f"<div>{counted(len(self) - len(shown), 'more token')}: see .df</div>" if len(self) > len(shown) else ""
        spans = ""
        for token, part in zip(shown, self.parts, strict=False):
            lines = _figures(token, part)
            lines += [f"{math.exp(it.logprob):7.2%}  {it.text!r}" for it in token.top if it.logprob is not None]
            title = html.escape("\n".join(lines), quote=True)
            spans += f"<span style='{_style(token, part, self.color)}' title='{title}'>{_visible_html(token)}</span>"
        return f"{_legend(self.color)}<div style='{TEXT_STYLE}'>{spans}</div>{more}"

    def _page(self) -> str:
        """Return a page that shows the alternatives of each token while the mouse is over it, or while it is selected
        with the Tab key.
        """
        tokens = ""
        for token, part in zip(self, self.parts, strict=True):
            bars = ""
            for other in token.top:
                if other.logprob is not None:
                    share = math.exp(other.logprob)
                    bars += f"<i><b style='width:{share:.1%}'></b>{share:.2%} {_visible_html(other)}</i>"
            head, style = html.escape("\n".join(_figures(token, part))), _style(token, part, self.color)
            # The values are shown while the token is selected.
            tokens += f"<span tabindex='0' style='{style}'>{_visible_html(token)}<span>{head}{bars}</span></span>"
        body = f"{_legend(self.color)}<main style='{TEXT_STYLE}'>{tokens}</main>"
        return page("Token lens", body, STYLES)


def rank_of(token: TokenLogprob) -> int | None:
    """Return the rank of a token, starting at 1; by default its position among the alternatives."""
    if token.rank is not None:
        return token.rank
    same = (token.token,) if token.token is not None else (None, token.bytes)
    keys = ((other.token,) if other.token is not None else (None, other.bytes) for other in token.top)
    return next((at for at, key in enumerate(keys, 1) if key == same), None)


def by_text(tokens: Sequence[TokenLogprob]) -> dict[str, float | None]:
    """Return the log-probabilities of tokens by their text."""
    return {token.text: token.logprob for token in tokens}


def value_of(token: TokenLogprob, color: ColorBy) -> float | None:
    """Return the value that determines the colour of a token; None if it is not known."""
    if color == "entropy":
        return token.entropy
    if color == "rank":
        return rank_of(token)
    return _probability(token)


def color_step(value: float, color: ColorBy) -> int:
    """Return the index of a value's colour; 0 is the colour of expected tokens."""
    limits = LIMITS[color]
    return sum(value < limit if color == "probability" else value > limit for limit in limits)


def _style(token: TokenLogprob, part: Part, color: ColorBy) -> str:
    value = value_of(token, color)
    background = f"background:{COLORS[color_step(value, color)]}{ALPHA};" if value is not None else ""
    return f"{background}{PART_STYLES[part]}border-radius:2px"


def visible_text(token: TokenLogprob) -> str:
    """Return the text of a token with visible spaces and line breaks. A special token is shown by its name."""
    return token.text.translate(VISIBLE)


def _visible_html(token: TokenLogprob) -> str:
    return html.escape(visible_text(token))


def _figures(token: TokenLogprob, part: Part) -> list[str]:
    lines = [f"{token.text!r}" + (f", id {token.token}" if token.token is not None else "")]
    if part != "text":
        lines.append({"text": "text", "reasoning": "part of the reasoning", "call": "part of a tool call"}[part])
    if token.logprob is not None:
        lines.append(f"probability {math.exp(token.logprob):.2%}, logprob {token.logprob:.4f}")
    if token.entropy is not None:
        lines.append(f"entropy {token.entropy:.3f}")
    if (rank := rank_of(token)) is not None:
        lines.append(f"rank {rank}")
    return lines


def _legend(color: ColorBy) -> str:
    sign = "≥" if color == "probability" else "≤"
    names = [f"{sign} {limit:g}" for limit in LIMITS[color]]
    names.append(f"{'<' if color == 'probability' else '>'} {LIMITS[color][-1]:g}")
    chips = " ".join(
        f"<span style='background:{colour}{ALPHA};padding:0 4px'>{html.escape(name)}</span>"
        for colour, name in zip(COLORS, names, strict=True)
    )
    return f"<div><small>{color}: {chips}</small></div>"


def parts_of(tokens: Sequence[TokenLogprob], answer: TokenAnswer) -> list[Part]:
    """Return the part of an answer that each token belongs to.

    The markers of reasoning and calls are neither in its text nor in its reasoning, so positions divide the parts.
    """
    raw = b"".join([token.bytes for token in tokens])
    reasoning, text = answer.reasoning.encode(), answer.text.strip().encode()
    thought = max(raw.find(reasoning), 0) + len(reasoning) if reasoning else 0
    at = raw.find(text, thought) if text else -1
    # Text before and after calls is not contiguous.
    start, end = (at, at + len(text)) if at >= 0 else (thought, len(raw) if text else thought)
    parts: list[Part] = []
    position = 0
    for token in tokens:
        if reasoning and position < start:
            parts.append("reasoning")
        else:
            parts.append("call" if answer.tool_calls and not start <= position < end else "text")
        position += len(token.bytes)
    return parts


async def lens_of(backend: Backend | None, answer: TokenAnswer, *, color: ColorBy = "probability") -> TokenLens:
    """Return the lens of an answer. If its log-probabilities are not known, its tokens are scored now, as a step.

    Args:
        backend: The lab that scores; None if there is none.

    Raises:
        NotLoadedError: another model is loaded.
        InvalidRequestError: the tokens cannot be scored.
    """
    if answer.has_logprobs or (answer.tokens and backend is None):
        return known_lens(answer, color=color)
    if backend is None:
        raise InvalidRequestError(f"the answer has no log-probabilities, and no lab can score its tokens; {ASK}")
    return await on_loop(backend.portal, scored_lens(backend, answer, color=color))


def known_lens(answer: TokenAnswer, *, color: ColorBy = "probability") -> TokenLens:
    """Return the lens of an answer with log-probabilities."""
    return TokenLens(answer.tokens, source="answer", color=color, parts=parts_of(answer.tokens, answer))


async def scored_lens(backend: Backend, answer: TokenAnswer, *, color: ColorBy = "probability") -> TokenLens:
    """Score the tokens of an answer, and return its lens.

    Raises:
        NotLoadedError: another model is loaded.
        InvalidRequestError: the tokens cannot be scored, or the files of the model have changed.
    """
    if not (answer.prompt_ids and answer.ids):
        raise InvalidRequestError(f"the token ids of this answer are not known, so they cannot be scored; {ASK}")
    if answer.weights or answer.format:
        await backend.require_weights(answer.model, answer.weights, answer.format)
    tokens = await backend.score(
        [*answer.prompt_ids, *answer.ids],
        model=answer.model,
        top=ALTERNATIVES,
        start=len(answer.prompt_ids),
        steer=recorded_steering(answer.request),
    )
    return TokenLens(tokens, source="scoring", color=color, parts=parts_of(tokens, answer))
