"""Generate an answer again from a given position, after another token, and define the tree of such branches.

``explore`` generates the answers that begin with the most probable tokens, and returns them as a tree.
"""

from __future__ import annotations

import asyncio
import functools
import html
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, TypeVar

from lmx_lab.arguments import Prompt, chat_request
from lmx_lab.backend import Backend, TokenAnswer
from lmx_lab.blocking import blocking, both, in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, counted
from lmx_lab.instrument.lens import ColorBy, TokenLens, lens_of
from lmx_lab.instrument.traces import ActivationCache, activation_fields, compute_trace
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import Displayed, Formats, html_text
from lmx_lab.sanitize import shorten
from lmx_lab.values.integers import integer, whole_number
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.values.recording import Continuation
from lmx_lab.wire.chat import ChatRequest

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    **{"name": "str", "parent": "str", "at": "Int64", "token": "str", "tokens": "int64"},
    **{"finish_reason": "str", "logprob": "float64", "text": "str"},
}
SHOWN_CHARACTERS = 60
WORD = re.compile(r"\s*\S+|\s+")
"""A word and the spaces before it."""
NAME_CHARACTERS = 200
"""Maximum length of the name of a branch."""
MAX_ANSWERS = 1000
"""Maximum number of answers in a tree."""
T = TypeVar("T")
MAX_LEAVES = 64


def continuation_of(
    answer: TokenAnswer, at: int, token: int | str, *, seed: int | None = None, max_tokens: int | None = None
) -> Continuation:
    """Return the request that generates the answer again from a given position.

    Args:
        at: Position of the first token that differs, starting at 0.
        token: The token at this position.

    Raises:
        InvalidRequestError: the position does not exist, or the tokens of the answer are not known.
    """
    if not (answer.request and answer.prompt_ids and answer.ids):
        raise InvalidRequestError(
            "the token ids of this answer are not known, because its server runs in another process, or the engine "
            "did not return all of them; use an answer of a lab that launch() started",
            param="at",
        )
    count = len(answer.ids)
    position = integer(at)
    if position is None or not 0 <= position < count:
        raise InvalidRequestError(
            f"at is {at!r:.40}; the answer has {counted(count, 'token')}, at the positions 0 to {count - 1}", param="at"
        )
    named = token if isinstance(token, str) and token else integer(token)
    if named is None:
        raise InvalidRequestError(f"token is {token!r:.80}; it must be the id or the text of one token", param="token")
    return Continuation(
        request=answer.request,
        model=answer.model,
        weights=answer.weights,
        format=answer.format,
        prompt=answer.prompt_ids,
        answer=answer.ids[:position],
        token=named,
        seed=None if seed is None else whole_number(seed, "seed"),
        max_tokens=None if max_tokens is None else whole_number(max_tokens, "max_tokens"),
    )


async def continue_answer(
    backend: Backend,
    answer: TokenAnswer,
    at: int,
    token: int | str,
    *,
    seed: int | None = None,
    max_tokens: int | None = None,
) -> TokenAnswer:
    """Generate an answer again from a given position; see ``continuation_of``.

    Raises:
        InvalidRequestError: the answer cannot be continued with this token at this position.
        NotLoadedError: another model is loaded.
    """
    continuation = continuation_of(answer, at, token, seed=seed, max_tokens=max_tokens)
    generated = await generate(backend, continuation)
    if not answer.is_scored or not generated.ids:
        return replace(generated, tokens=())
    chosen = chosen_token(answer.tokens[at], generated.ids[at])
    if chosen is None:
        return replace(generated, tokens=())
    return replace(generated, tokens=(*answer.tokens[:at], chosen, *generated.tokens))


async def generate(backend: Backend, continuation: Continuation, *, recorded: bool = True) -> TokenAnswer:
    """Generate the rest of an answer. The log-probabilities of the result are those of the generated tokens."""
    running = await backend.continue_answer(continuation, recorded=recorded)
    return replace(await running.read(), weights=continuation.weights)


def chosen_token(position: TokenLogprob, token: int) -> TokenLogprob | None:
    """Return a token as if it had been chosen at a position; None if its log-probability is not known."""
    if position.token == token:
        return position
    for rank, other in enumerate(position.top, 1):
        if other.token == token:
            return replace(other, top=position.top, named=position.named, entropy=position.entropy, rank=rank)
    for other in position.named:
        if other.token == token:
            return replace(other, top=position.top, named=position.named, entropy=position.entropy)
    return None


class CanBranch(ABC):
    """An object with an answer from which branches are generated."""

    @property
    @abstractmethod
    def _start(self) -> Branch:
        """The answer in its tree."""

    async def _branch(
        self,
        at: int,
        token: int | str,
        *,
        name: str | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> Branch:
        """Replace the token at a position, generate the rest of the answer again, and add the result to the tree.

        The tokens before the position are kept, and are not computed again if they are cached. The rest is generated
        with the sampling parameters of the request. The branch is recorded.

        Args:
            at: Position of the token, starting at 0.
            token: Id of the new token, or a text that is exactly one token of the model.
            name: Name in the tree; by default ``branch 1``, ``branch 2``, etc.
            seed: Seed of the rest; by default a random one.
            max_tokens: Maximum number of tokens of the whole answer; by default the limit of the request.

        Raises:
            InvalidRequestError: the position or the token does not exist, the position is inside a character, the
                answer is a forced tool call, the files of the loaded model have changed, there is no lab that can
                generate, the tree has ``MAX_ANSWERS`` answers, or the name cannot be used.
            NotLoadedError: another model is loaded.
        """
        # In another thread, because a recorded request reads its answer from the recording.
        start = await in_thread(lambda: self._start)
        if (backend := start._tree._backend) is None:
            raise InvalidRequestError(
                "this answer has no lab that can generate; generate the branch in the kernel that generated the answer"
            )
        start._tree._require_room(name)
        answer = await on_loop(
            backend.portal, continue_answer(backend, start.answer, at, token, seed=seed, max_tokens=max_tokens)
        )
        # Integers of NumPy have no JSON form.
        named = token if isinstance(token, str) else int(token)
        return start._tree.add(start, int(at), named, answer=answer, name=name)

    branch, abranch = both(_branch)


class Branch(CanBranch):
    """A complete answer in a tree. Its first tokens, up to ``at``, are those of its parent.

    Attributes:
        parent: The answer from which it branches; None for the first answer of the tree.
        at: Position of the first token that differs from the parent; None for the first answer.
        token: Text or id of the token at this position; None for the first answer.
        answer: The answer with its tokens.
        branches: The answers that branch from this one.
    """

    def __init__(
        self,
        tree: AnswerTree,
        answer: TokenAnswer,
        *,
        name: str,
        parent: Branch | None = None,
        at: int | None = None,
        token: int | str | None = None,
    ) -> None:
        self._tree = tree
        self._name = name
        self.answer = answer
        self.parent = parent
        self.at = at
        self.token = token
        self.branches: list[Branch] = []
        self._scored: TokenLens | None = None

    @property
    def name(self) -> str:
        """Name of the branch in its tree, with up to ``NAME_CHARACTERS`` characters. Assign another one to rename it.

        Raises:
            InvalidRequestError: the name is not a text, is empty, is too long, contains control characters, or belongs
                to another branch.
        """
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._tree._require_free(name, self)
        self._name = name

    @property
    def text(self) -> str:
        """Text of the whole answer."""
        return self.answer.text

    @property
    def reasoning(self) -> str:
        """Reasoning of the whole answer."""
        return self.answer.reasoning

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole answer."""
        return self.answer.ids

    @property
    def finish_reason(self) -> str:
        """How the answer ended."""
        return self.answer.finish_reason

    async def _lens(self, *, color: ColorBy = "probability") -> TokenLens:
        """Return the probabilities of all tokens of the answer; see ``Reply.lens``.

        Raises:
            NotLoadedError: another model is loaded.
            InvalidRequestError: there are no log-probabilities, and the tokens cannot be scored.
        """
        if self._scored is None:
            self._scored = await lens_of(self._tree._backend, self.answer, color=color)
        return self._scored.colored(color)

    lens = blocking(_lens)

    @property
    def logprob(self) -> float:
        """Log-probability of the whole answer. If it is not known, the tokens are scored. See ``lens`` for errors."""
        return self.lens().logprob

    @property
    def known_logprob(self) -> float | None:
        """Log-probability of the whole answer if it is known without scoring; None otherwise."""
        return self.logprob if self._scored is not None or self.answer.is_scored else None

    @property
    def _start(self) -> Branch:
        return self

    def tree(self) -> AnswerTree:
        """Return the tree of the branch."""
        return self._tree

    def __repr__(self) -> str:
        place = "" if self.parent is None else f", {self.token!r} at {self.at} of {self.parent.name!r}"
        return f"<Branch {self.name!r}{place}: {_short(self.text)}>"


class HasTokens(CanBranch):
    """An object with an answer: the probabilities of its tokens, and branches that are generated from it."""

    _backend: Backend | None = None
    """The lab that can score the answer."""

    @property
    @abstractmethod
    def _tokens(self) -> TokenAnswer:
        """The answer with its tokens."""

    async def _lens(self, *, color: ColorBy = "probability") -> TokenLens:
        """Return the probabilities of the answer's tokens.

        They are those of the answer if the request contains ``logprobs``. Otherwise, the same tokens are scored, which
        requires that the model is loaded.

        Args:
            color: Value that determines the colours of the display: ``probability``, ``entropy`` or ``rank``.

        Raises:
            NotLoadedError: another model is loaded.
            InvalidRequestError: there are no log-probabilities, and the tokens cannot be scored.
        """
        # In another thread, because a recorded request reads its answer from the recording.
        return await lens_of(self._backend, await in_thread(lambda: self._tokens), color=color)

    lens, alens = both(_lens)

    async def _trace(
        self, hooks: str | Sequence[str], *, positions: int | Sequence[int] | None = None
    ) -> ActivationCache:
        """Compute the prompt and the answer again, and return internal values of the model; see ``Lab.trace``.

        Raises:
            NotLoadedError: another model is loaded.
            InvalidRequestError: the tokens of the answer are not known, or a hook or position does not exist.
        """
        backend = self._backend
        if backend is None:
            raise InvalidRequestError("there is no lab that can compute the tokens of this answer; use lab.trace(...)")
        return ActivationCache(await compute_trace(backend, self, activation_fields(hooks, positions)))

    trace, atrace = both(_trace)

    def tree(self) -> AnswerTree:
        """Return the answer with the branches that were generated from this object."""
        return self._tree

    @functools.cached_property
    def _tree(self) -> AnswerTree:
        return AnswerTree(self._tokens, self._backend)

    @property
    def _start(self) -> Branch:
        return self.tree().root


class AnswerTree(Displayed):
    """An answer and its branches. Iterating yields all of them, each one before its own branches.

    ``tree["name"]`` is the branch with this name. The first answer has the name ``answer``.

    Args:
        backend: The lab that generates and scores; None if there is none.
    """

    def __init__(self, answer: TokenAnswer, backend: Backend | None, *, name: str = "answer") -> None:
        self._backend = backend
        self.root = Branch(self, answer, name=name)

    def __iter__(self) -> Iterator[Branch]:
        waiting = [self.root]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += reversed(branch.branches)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Branch:
        found = next((branch for branch in self if branch.name == name), None)
        if found is None:
            raise KeyError(f"there is no branch {name!r:.80}; the branches are {', '.join(it.name for it in self)}")
        return found

    def add(self, parent: Branch, at: int, token: int | str, *, answer: TokenAnswer, name: str | None = None) -> Branch:
        """Add an answer that branches from another one.

        Raises:
            InvalidRequestError: the tree has ``MAX_ANSWERS`` answers, or the name cannot be used; see ``Branch.name``.
        """
        self._require_room(name)
        if name is None:
            names = {branch.name for branch in self}
            name = next(free for number in itertools.count(len(names)) if (free := f"branch {number}") not in names)
        branch = Branch(self, answer, name=name, parent=parent, at=at, token=token)
        parent.branches.append(branch)
        return branch

    def prune(self, branch: Branch | str) -> None:
        """Remove a branch, together with its own branches.

        Raises:
            InvalidRequestError: it is the first answer of the tree.
        """
        branch = self._find(branch)
        if branch.parent is None:
            raise InvalidRequestError(f"{branch.name!r} is the first answer of the tree; only branches can be removed")
        branch.parent.branches.remove(branch)

    def diff(self, one: Branch | str, other: Branch | str) -> BranchDiff:
        """Compare two answers of the tree."""
        return BranchDiff(one=self._find(one), other=self._find(other))

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each answer: its name, from which answer it branches, where, and with which
        token; its number of tokens, how it ended, its log-probability, and its text.

        The log-probability is missing where the tokens have not been scored; ``branch.logprob`` scores them.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return make_table(map(_row, self), COLUMNS)

    def to_json(self) -> str:
        """Return the tree as JSON: the model, the token ids of the prompt, and the branches with their tokens."""
        branches = [
            {
                **dict(zip(COLUMNS, _row(branch), strict=True)),
                "reasoning": branch.reasoning,
                "ids": branch.ids,
                "logprobs": [token.logprob for token in branch.answer.tokens] if branch.answer.is_scored else None,
            }
            for branch in self
        ]
        answer = self.root.answer
        document = {"model": answer.model, "weights": answer.weights, "prompt": answer.prompt_ids, "branches": branches}
        return json.dumps(document, ensure_ascii=False, indent=1)

    def _formats(self) -> Formats:
        return {**super()._formats(), ".json": lambda: self.to_json().encode()}

    def __repr__(self) -> str:
        return "\n".join(f"{'  ' * depth}{_line(branch)}" for depth, branch in self.walk())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<div style='padding-left:{2 * depth}em'>{html.escape(_line(branch))}</div>"
            for depth, branch in self.walk()
        )
        return f"<div style='font-family:monospace;white-space:pre-wrap'>{rows}</div>"

    def walk(self) -> Iterator[tuple[int, Branch]]:
        """Yield all answers in the order of iteration, each with its number of ancestors."""
        for branch in self:
            depth, parent = 0, branch.parent
            while parent is not None:
                depth, parent = depth + 1, parent.parent
            yield depth, branch

    def _find(self, branch: Branch | str) -> Branch:
        return self[branch] if isinstance(branch, str) else self[branch.name]

    def _require_room(self, name: str | None) -> None:
        """Check that an answer with this name can be added."""
        if len(self) >= MAX_ANSWERS:
            raise InvalidRequestError(
                f"the tree has {MAX_ANSWERS} answers, which is the limit; remove some with tree.prune(name)"
            )
        if name is not None:
            self._require_free(name)

    def _require_free(self, name: object, renamed: Branch | None = None) -> None:
        if not isinstance(name, str) or not name.strip():
            raise InvalidRequestError(
                f"the name of a branch is {name!r:.80}; it must be a text that is not empty", param="name"
            )
        if len(name) > NAME_CHARACTERS:
            raise InvalidRequestError(
                f"the name of a branch has {len(name)} characters; the limit is {NAME_CHARACTERS}", param="name"
            )
        if not name.isprintable():
            raise InvalidRequestError(
                f"the name of a branch is {name!r:.80}; it must not contain line breaks or other control characters",
                param="name",
            )
        if any(branch.name == name and branch is not renamed for branch in self):
            raise InvalidRequestError(f"there is already a branch {name!r:.80}; choose another name", param="name")


@dataclass(frozen=True, kw_only=True, repr=False)
class BranchDiff(Displayed):
    """Two answers of a tree, and where they differ."""

    one: Branch
    other: Branch

    @property
    def first_difference(self) -> int | None:
        """Position of the first token that differs; None if all are the same."""
        pairs = itertools.zip_longest(self.one.ids, self.other.ids)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), None)

    @property
    def logprob(self) -> float:
        """How much more probable the first answer is, as a difference of log-probabilities. Raises as ``lens``."""
        return self.one.logprob - self.other.logprob

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each run of words: whether it is ``equal``, or how it was changed
        (``replace``, ``delete``, ``insert``), and its text in both answers.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        dtypes = dict.fromkeys(("change", "one", "other"), "str")
        return make_table(word_changes(self.one.text, self.other.text), dtypes)

    def __repr__(self) -> str:
        at = self.first_difference
        place = "the same tokens" if at is None else f"first difference at token {at}"
        return f"<BranchDiff of {self.one.name!r} and {self.other.name!r}: {place}>"

    def _repr_html_(self) -> str:
        runs = word_changes(self.one.text, self.other.text)
        return f"<div style='white-space:pre-wrap'>{marked_changes(runs)}</div>"


def word_changes(one: str, other: str) -> Iterator[tuple[str, str, str]]:
    """Yield the runs of words of two texts, each with its kind: ``equal``, ``replace``, ``delete`` or ``insert``."""
    words, others = WORD.findall(one), WORD.findall(other)
    for kind, a, b, c, d in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        yield kind, "".join(words[a:b]), "".join(others[c:d])


def marked_changes(runs: Iterable[tuple[str, str, str]]) -> str:
    """Return HTML in which removed words are struck through, and added words underlined."""
    pieces = []
    for kind, before, after in runs:
        if kind == "equal":
            pieces.append(html_text(after))
            continue
        pieces += [f"<del>{html_text(before)}</del>"] if before else []
        pieces += [f"<ins>{html_text(after)}</ins>"] if after else []
    return "".join(pieces)


def _row(branch: Branch) -> tuple[Any, ...]:
    return (
        branch.name,
        branch.parent.name if branch.parent is not None else None,
        branch.at,
        branch.token,
        len(branch.ids),
        branch.finish_reason,
        branch.known_logprob,
        branch.text,
    )


def _line(branch: Branch) -> str:
    place = "" if branch.parent is None else f" at {branch.at}, {branch.token!r}"
    logprob = branch.known_logprob
    figures = counted(len(branch.ids), "token") + ("" if logprob is None else f", log-probability {logprob:.2f}")
    return f"{branch.name}{place} ({figures}): {_short(branch.text)}"


def _short(text: str) -> str:
    return repr(shorten(text, SHOWN_CHARACTERS))


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """The first tokens of an answer."""

    ranks: tuple[int, ...] = ()
    """The rank of each token at its position, starting at 1."""
    tokens: tuple[TokenLogprob, ...] = ()
    ended: bool = False
    """Whether the answer ends with these tokens."""

    @property
    def is_whole(self) -> bool:
        """Whether no character is incomplete, so that an answer can be continued with a given token."""
        return not b"".join(token.bytes for token in self.tokens).decode(errors="replace").endswith("\ufffd")

    @property
    def name(self) -> str:
        return "-".join(map(str, self.ranks))

    def extended(self, position: TokenLogprob, width: int) -> list[_Beginning]:
        """Return this beginning with each of the most probable tokens of a position."""
        result = []
        for rank, other in enumerate(position.top[:width], 1):
            token = chosen_token(position, other.token) if other.token is not None else None
            if token is not None:
                result.append(_Beginning(ranks=(*self.ranks, rank), tokens=(*self.tokens, token)))
        return result


async def explore(
    backend: Backend, /, prompt: Prompt, *, width: int = 3, depth: int = 2, max_tokens: int = 64, **parameters: Any
) -> AnswerTree:
    """Generate the answers that begin with the most probable tokens, all together, and return them as a tree.

    At each of the first ``depth`` positions, the ``width`` most probable tokens are taken, which makes up to
    ``width ** depth`` answers. They are recorded. An answer does not branch inside a character of several tokens.

    Args:
        width: Number of tokens at each position, up to 20.
        depth: Number of positions; there may be up to 64 answers.
        max_tokens: Maximum length of each answer.
        parameters: Other parameters of ``chat``.

    Raises:
        NotLoadedError: no model is loaded.
        InvalidRequestError: a parameter does not exist or is out of range, the server runs in another process, or the
            answer cannot be continued after one of the tokens, for example because ``response_format`` does not allow
            the token.
    """
    request = chat_request(prompt, parameters)
    # ``top_logprobs`` of a request is at most 20.
    for name, value, most in (("width", width, 20), ("depth", depth, MAX_LEAVES)):
        if (number := integer(value)) is None or not 1 <= number <= most:
            raise InvalidRequestError(f"{name} is {value!r:.40}; it must be from 1 to {most}", param=name)
    width, depth = int(width), int(depth)
    if width**depth > MAX_LEAVES:
        raise InvalidRequestError(
            f"width {width} and depth {depth} give {width**depth} answers; the limit is {MAX_LEAVES}", param="depth"
        )
    if (length := integer(max_tokens)) is None or length < depth:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens!r:.40}; with depth {depth} it must be at least {depth}", param="max_tokens"
        )
    fields = {"max_tokens": 1, "max_completion_tokens": None, "logprobs": True, "top_logprobs": width}
    return await on_loop(
        backend.portal,
        _explored(backend, request.model_copy(update=fields), width=width, depth=depth, max_tokens=length),
    )


async def _explored(backend: Backend, request: ChatRequest, *, width: int, depth: int, max_tokens: int) -> AnswerTree:
    first = await (await backend.generate(request, internal=True)).read()
    if not first.ids or not first.tokens:
        raise InvalidRequestError(
            "the token ids of this answer are not known, because its server runs in another process, or the engine "
            'does not return them; use a lab that launch() started, and leave out tools or load with engine="mlx"'
        )
    beginnings = _Beginning().extended(first.tokens[0], width)
    for _ in range(1, depth):
        running = [it for it in beginnings if not it.ended and it.is_whole]
        # One token after each beginning, with its alternatives.
        following = await _together(
            [_generate(backend, first, it, max_tokens=len(it.tokens) + 1, top=width, recorded=False) for it in running]
        )
        positions = {it.ranks: answer.tokens[0] for it, answer in zip(running, following, strict=True) if answer.tokens}
        beginnings = [
            longer
            for it in beginnings
            for longer in (
                it.extended(positions[it.ranks], width) if it.ranks in positions else [replace(it, ended=True)]
            )
        ]
    answers = await _together([_generate(backend, first, it, max_tokens=max_tokens, top=width) for it in beginnings])
    return _tree(beginnings, answers, backend)


async def _generate(
    backend: Backend, first: TokenAnswer, beginning: _Beginning, *, max_tokens: int, top: int, recorded: bool = True
) -> TokenAnswer:
    """Generate the rest of an answer.

    Raises:
        InvalidRequestError: the answer cannot be continued after the last token of the beginning.
    """
    ids = [token.token for token in beginning.tokens if token.token is not None]
    continuation = Continuation(
        request=first.request,
        model=first.model,
        format=first.format,
        prompt=first.prompt_ids,
        answer=tuple(ids[:-1]),
        token=ids[-1],
        max_tokens=max_tokens,
        top_logprobs=top,
    )
    try:
        return await generate(backend, continuation, recorded=recorded)
    except InvalidRequestError as exc:
        if exc.param != "token":
            raise
        # The caller did not choose the token, so the error explains its origin.
        at, text = len(beginning.tokens) - 1, beginning.tokens[-1].text
        has_format = first.request.get("answer_format") is not None
        remedy = "; leave out response_format, so that all tokens are allowed" if has_format else ""
        raise InvalidRequestError(
            f"explore selects the most probable tokens, and cannot continue after {text!r:.80} at position {at}: "
            f"{exc.message}{remedy}"
        ) from exc


def _tree(beginnings: Sequence[_Beginning], answers: Sequence[TokenAnswer], backend: Backend) -> AnswerTree:
    """Return the tree in which each answer branches from the one with the most probable tokens at these positions."""
    scored = [
        replace(answer, tokens=(*beginning.tokens, *answer.tokens))
        for beginning, answer in zip(beginnings, answers, strict=True)
    ]
    tree = AnswerTree(scored[0], backend, name=beginnings[0].name)
    nodes: dict[tuple[int, ...], Branch] = {_place(beginnings[0].ranks): tree.root}
    for beginning, answer in zip(beginnings[1:], scored[1:], strict=True):
        place = _place(beginning.ranks)
        at = len(place) - 1
        token = beginning.tokens[at]
        parent = nodes[_place(place[:at])]
        nodes[place] = tree.add(parent, at, token.text, answer=answer, name=beginning.name)
    return tree


def _place(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks up to the last token that is not the most probable one."""
    count = len(ranks)
    while count and ranks[count - 1] == 1:
        count -= 1
    return tuple(ranks[:count])


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time. If one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each, name="explore") for each in work]
    except* Exception as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
