"""The lens panel: the tokens of the newest answer with their probabilities, their alternatives, and its branches."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import traitlets

from lmx_lab.backend import TokenAnswer
from lmx_lab.errors import InvalidRequestError, ModelBusyError, counted
from lmx_lab.instrument.branches import AnswerTree, Branch, continue_answer
from lmx_lab.instrument.lens import LIMITS, TokenLens, known_lens, rank_of, scored_lens, visible_text
from lmx_lab.panels.panel import Panel, integer_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.sanitize import clip, escape_text
from lmx_lab.wire.admin import RequestEvent

SHOWN_TOKENS = 8000
"""Maximum number of tokens in a view."""
MAX_BRANCHES = 100
TEXT_CHARACTERS = 80
"""Maximum number of characters of an answer in the list of branches."""


class LensPanel(Panel):
    """Shows the newest recorded answer, and generates branches of it.

    Args:
        automatic_tokens: Maximum number of tokens of a prompt and its answer that are scored automatically. 1,000
            tokens take a few seconds.
    """

    SCRIPTS = ("elements.js", "panel.js", "lens.js")
    STYLES = ("panel.css", "lens.css")
    FULL_WIDTH = True
    BY_NAME_ONLY = True

    limits = traitlets.Dict({name: list(values) for name, values in LIMITS.items()}).tag(sync=True)
    """The last value of each colour but the last one."""
    follows = traitlets.Bool(True).tag(sync=True)
    """Whether a new answer replaces the one that is shown."""
    busy = traitlets.Unicode().tag(sync=True)
    """The activity of the panel; empty if it is idle."""
    error = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    """The answer that is shown, with its tokens; empty before the first one."""
    branches: Any = traitlets.List().tag(sync=True)
    """The answers of the tree, for the list of branches; empty if there is only one."""

    def __init__(self, workbench: Workbench, *, automatic_tokens: int = 1000) -> None:
        self._automatic_tokens = automatic_tokens
        self._tree: AnswerTree | None = None
        self._shown: Branch | None = None
        self._lenses: dict[Branch, TokenLens] = {}
        self._record: int | None = None
        """Id of the newest record that was read."""
        self._is_outdated = False
        """Whether a request has ended since the newest record was read."""
        super().__init__(workbench)
        workbench.submit(self.do_follow({"follows": True}))

    # Following

    def request_ended(self, event: RequestEvent) -> None:
        if event.kind == "chat":
            self._follow()

    def backend_changed(self) -> None:
        self._tree = self._shown = self._record = None
        self._lenses.clear()
        self.show(answer={}, branches=[], error="")

    async def do_follow(self, fields: Mapping[str, Any]) -> None:
        """Follow the newest answer, or keep the one that is shown."""
        self.show(follows=bool(fields.get("follows")))
        self._follow()

    def _follow(self) -> None:
        """Show the newest answer, after the work that is in progress."""
        self._is_outdated = self.task is not None
        if self.shown("follows") and self.task is None:
            self._start("", self._read_newest())

    async def _read_newest(self) -> None:
        record = await self.workbench.backend.record()
        if record is None or record.id == self._record:
            return
        self._record = record.id
        self.show(error="")
        self._tree = AnswerTree(TokenAnswer.of_record(record), None)
        self._lenses.clear()
        self._show(self._tree.root)
        if self._tree.root.answer.ids:
            await self._score_automatically(self._tree.root)

    # Work

    def _start(self, activity: str, work: Coroutine[Any, Any, None]) -> None:
        if activity:
            # Only work that the user started removes an error: following may begin right after that work has failed.
            self.show(busy=activity, error="")

        def ended(error: str | None) -> None:
            error = "Cancelled." if error is None else error
            self.show(busy="", **({"error": error} if error else {}))
            if self._is_outdated:
                self._follow()

        self.run_job(work, ended)

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Cancel the work in progress, if there is any."""
        if self.task is not None:
            self.task.cancel()

    async def do_score(self, fields: Mapping[str, Any]) -> None:
        """Start to score the tokens of the answer that is shown."""
        self._start("Scoring the tokens…", self._score(self._idle()))

    async def _score_automatically(self, branch: Branch) -> None:
        answer = branch.answer
        if not answer.has_logprobs and len(answer.prompt_ids) + len(answer.ids) <= self._automatic_tokens:
            await self._score(branch)

    async def _score(self, branch: Branch) -> None:
        self.show(busy="Scoring the tokens…")
        self._lenses[branch] = await scored_lens(self.workbench.backend, branch.answer)
        if self._shown is branch:
            self._show(branch)

    async def do_branch(self, fields: Mapping[str, Any]) -> None:
        """Start to generate the answer again after another token."""
        shown = self._idle()
        at = integer_field(fields, "at", low=0, high=max(0, len(shown.ids) - 1), default=0)
        token = integer_field(fields, "token", low=0, high=2**31, default=None)
        if at is None or token is None:
            raise InvalidRequestError("token is missing; send the id of a token", param="token")
        if len(shown.tree()) >= MAX_BRANCHES:
            raise InvalidRequestError(f"the tree has {MAX_BRANCHES} answers, which is the limit; remove some branches")
        self._start("Generating a branch…", self._branch(shown, at, token))

    async def _branch(self, parent: Branch, at: int, token: int) -> None:
        answer = await continue_answer(self.workbench.backend, parent.answer, at, token)
        # The branch is recorded as well, and must not replace the tree.
        newest = await self.workbench.backend.record()
        self._record = newest.id if newest is not None else None
        tree = parent.tree()
        position = self._lens_of(parent)[at]
        text = next((other.text for other in (position, *position.top) if other.token == token), token)
        branch = tree.add(parent, at, text, answer=answer)
        self._show(branch)
        await self._score_automatically(branch)

    def _idle(self) -> Branch:
        # The newest answer is shown shortly before the work that has read it ends.
        if self.task is not None and self.shown("busy"):
            raise ModelBusyError("this panel is already working; cancel its work, or wait for the result")
        if self._shown is None:
            raise InvalidRequestError("there is no answer yet; send a request first")
        return self._shown

    # Branches

    async def do_show(self, fields: Mapping[str, Any]) -> None:
        """Show an answer of the tree."""
        self._show(self._named(fields))

    async def do_prune(self, fields: Mapping[str, Any]) -> None:
        """Remove a branch, together with its own branches."""
        branch = self._named(fields)
        tree = branch.tree()
        tree.prune(branch)
        remaining = set(tree)
        self._lenses = {each: lens for each, lens in self._lenses.items() if each in remaining}
        self._show(self._shown if self._shown in remaining else branch.parent or tree.root)

    def _named(self, fields: Mapping[str, Any]) -> Branch:
        name = text_field(fields, "name")
        for branch in self._tree or ():
            if branch.name == name:
                return branch
        raise InvalidRequestError(f"there is no branch {name!r:.80}; choose one of the list", param="name")

    # State

    def _lens_of(self, branch: Branch) -> TokenLens:
        known = branch.answer if branch.answer.has_logprobs else replace(branch.answer, tokens=())
        return self._lenses.get(branch) or known_lens(known)

    def _show(self, branch: Branch | None) -> None:
        assert branch is not None
        self._shown = branch
        answer, lens = branch.answer, self._lens_of(branch)
        # Each row contains the text of a token, its part of the answer, its values, its id, and its alternatives.
        tokens = []
        for token, part in zip(lens[:SHOWN_TOKENS], lens.parts, strict=False):
            others = [
                [clip(visible_text(other), TEXT_CHARACTERS), _rounded(other.logprob), other.token]
                for other in token.top
            ]
            values = [_rounded(token.logprob), _rounded(token.entropy), rank_of(token)]
            tokens.append([clip(visible_text(token), TEXT_CHARACTERS), part, *values, token.token, others])
        more = f", of which {SHOWN_TOKENS:,} are shown" if len(lens) > SHOWN_TOKENS else ""
        figures = f", log-probability {lens.logprob:.2f}" if len(lens) else ""
        refusal = "" if answer.ids else "the engine did not report the token ids of this answer"
        # Positions of branches are those of the ids.
        if answer.ids and tuple(token.token for token in lens) != answer.ids:
            refusal = "the engine reported the probabilities of other tokens than those of the answer"
        shown = {
            "name": branch.name,
            "at": branch.at,
            "model": clip(answer.model, TEXT_CHARACTERS),
            "caption": f"{counted(len(answer.ids) or len(lens), 'token')}{more}{figures}",
            "text": "" if len(lens) else clip(answer.text, 4000),
            "scored": bool(len(lens)),
            "refusal": refusal,
            "tokens": tokens,
        }
        rows = [
            {
                "id": each.name,
                "depth": depth,
                "place": "" if each.at is None else f"at {each.at}: {escape_text(str(each.token))!r}",
                "tokens": counted(len(each.ids), "token"),
                "logprob": _rounded(self._lenses[each].logprob if each in self._lenses else each.known_logprob),
                "text": clip(each.text, TEXT_CHARACTERS),
                "shown": each is branch,
            }
            for depth, each in (self._tree.walk() if self._tree is not None else ())
        ]
        self.show(answer=shown, branches=rows if len(rows) > 1 else [])
        if not tokens and not answer.ids:
            self.show(error="The engine did not report the tokens of this answer; send the request with logprobs.")

    def snapshot_html(self) -> str:
        branch = self._shown
        if branch is None:
            return "<p>Lens: no answer yet</p>"
        rows = "".join(
            f"<li>{escape(row['id'])} {escape(row['place'])}: {escape(row['text'])}</li>"
            for row in self.shown("branches")
        )
        lens = self._lens_of(branch)
        text = lens._repr_html_() if len(lens) else f"<p>{escape(clip(branch.text, 4000))}</p>"
        return f"<p>{escape(self.shown('answer')['caption'])}</p>{text}<ul>{rows}</ul>"


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
