"""Divide texts into tokens and feed them to a splitter, with the formats of mlx-lm's tool parsers."""

import re
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

from lmx_lab.engine.text.channels import CONTENT, REASONING, TOOL, ChannelFormat
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.text.tool_calls import CallFormat
from tests.support.engines import merge

THOUGHTS = ("<think>", "</think>")


def tool_parser(name):
    """Load one of mlx-lm's tool parsers, without the import of mlx-lm, which takes a second."""
    package = Path(find_spec("mlx_lm").origin)
    spec = spec_from_file_location(name, package.with_name("tool_parsers") / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_linear(work, few):
    """Check that the time of a work for a count is at most linear: quadratic time would be 400 times as long."""

    def seconds(count):
        begun = time.thread_time()
        work(count)
        return time.thread_time() - begun

    assert min(seconds(20 * few) for _ in range(2)) < 100 * min(seconds(few) for _ in range(3))


class Tokens:
    """A text as tokens that end at the given bytes. Each special token is a token of its own, which decoding skips."""

    def __init__(self, text, cuts, specials=()):
        data, self.special_at = text.encode(), set[int]()
        edges = {0, len(data), *(cut for cut in cuts if 0 < cut < len(data))}
        for found in self._find(text, specials):
            start, end = (len(text[:at].encode()) for at in found)
            self.special_at.add(start)
            edges = {edge for edge in edges if not start < edge < end} | {start, end}
        self.edges = sorted(edges)
        self.chunks = [data[start:end] for start, end in pairwise(self.edges)]
        at = [start in self.special_at for start, _ in pairwise(self.edges)]
        self.literals = {i: chunk.decode() for i, chunk in enumerate(self.chunks) if at[i]}

    def _find(self, text, specials):
        pattern = "|".join(map(re.escape, specials))
        return [found.span() for found in re.finditer(pattern, text)] if specials else []

    def decode(self, tokens):
        shown = (self.chunks[token] for token in tokens if token not in self.literals)
        return b"".join(shown).decode("utf-8", "replace")


@dataclass
class SplitAnswer:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each call."""
    stopped: bool = False
    entries: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    reasoning_tokens: int = 0

    @property
    def shown(self):
        return self.text, self.reasoning, self.calls, self.stopped


def run(splitter, tokens):
    """Feed all tokens, each as its own entry, and return what the splitter returned."""
    pieces = []
    for token in tokens:
        pieces.append(splitter.add(token, token))
        if pieces[-1].stopped:
            return pieces
    return [*pieces, splitter.finish()]


def answer(tokens, channel_format, stops=()):
    """Feed all tokens to a splitter and return the whole answer."""
    splitter = TextSplitter(tokens.decode, stops, replace(channel_format, literals=tokens.literals))
    pieces = run(splitter, range(len(tokens.chunks)))
    calls, ids = merge(delta for piece in pieces for delta in piece.calls)
    assert splitter.has_called == bool(calls)
    return SplitAnswer(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=calls,
        stopped=pieces[-1].stopped,
        entries=[entry for piece in pieces for entry in piece.entries],
        ids=ids,
        reasoning_tokens=splitter.reasoning_tokens,
    )


def channel_format_of(calls=None, *, thinks=True, initial=CONTENT, parsed=True):
    """Return the channel format that an engine creates for one of mlx-lm's tool parsers."""
    transitions = {CONTENT: []}
    if thinks:
        transitions[CONTENT].append((THOUGHTS[0], REASONING))
        transitions[REASONING] = [(THOUGHTS[1], CONTENT)]
    if calls is None:
        return ChannelFormat(initial=initial, transitions=transitions)
    for state in list(transitions):
        transitions[state].append((calls.tool_call_start, TOOL))
    transitions[TOOL] = [(calls.tool_call_end, CONTENT)] if calls.tool_call_end else []
    parse = (lambda text: calls.parse_tool_call(text, None)) if parsed else None
    return ChannelFormat(
        initial=initial,
        transitions=transitions,
        calls=CallFormat(start=calls.tool_call_start, end=calls.tool_call_end, parse=parse),
    )


def places(chunks):
    """Return the range of characters of each token. A part of a character counts as the whole character."""
    data, edges = b"".join(chunks), [0]
    for chunk in chunks:
        edges.append(edges[-1] + len(chunk))
    before = [len(data[:edge].decode("utf-8", "ignore")) for edge in edges]
    upto = [len(data[:edge].decode("utf-8", "replace")) for edge in edges]
    return [(before[i], upto[j]) if edges[i] < edges[j] else (upto[i],) * 2 for i, j in pairwise(range(len(edges)))]
