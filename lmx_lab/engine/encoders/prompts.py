"""How a decoder is asked about a query and a document: a text with a place for the document. No MLX, no tokens."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from lmx_lab.engine.encoders.recipe import ChatForm
from lmx_lab.engine.templates.renderer import TemplateLimitError, render_chat
from lmx_lab.errors import InvalidRequestError, UnusableModelError


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What stands around every document of one query."""

    before: str
    after: str
    strip: bool = False
    """The document goes in without the white space at its ends."""


class PairForm(Protocol):
    def frame(self, query: str) -> Frame: ...


class QwenPairs:
    """The prompt that Qwen3-Reranker was trained with, as its model card documents it."""

    def frame(self, query: str) -> Frame:
        judge = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        instruct = "Given a web search query, retrieve relevant passages that answer the query"
        return Frame(
            before=f"<|im_start|>system\n{judge}<|im_end|>\n<|im_start|>user\n"
            f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: ",
            after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )


class ChatPairs:
    """The model's chat template, rendered once for each query."""

    def __init__(self, tokenizer: Any, form: ChatForm, model: str) -> None:
        """Tries the template out.

        Raises:
            UnusableModelError: the template fails, or does not show both the query and the document.
        """
        self._tokenizer = tokenizer
        self._form = form
        self._model = model
        try:
            frame = self.frame(probe := uuid.uuid4().hex)
        except InvalidRequestError as exc:
            raise UnusableModelError(exc.message) from exc
        if probe not in frame.before + frame.after:
            raise UnusableModelError("its chat template does not show a message with the role query")

    def frame(self, query: str) -> Frame:
        """
        Raises:
            InvalidRequestError: the template refuses this query.
        """
        mark = uuid.uuid4().hex
        # White space around the mark shows whether the template strips documents.
        document = f"\n {mark} \n"
        text = self._render(query, document)
        strip = document not in text
        before, found, after = text.partition(mark if strip else document)
        if not found:
            raise InvalidRequestError(f"the chat template of {self._model} does not show the document", param="query")
        return Frame(before=before, after=after, strip=strip)

    def _render(self, query: str, document: str) -> str:
        messages = [self._message("query", query), self._message("document", document)]
        if self._form.system:
            messages.insert(0, self._message("system", self._form.system))
        try:
            return render_chat(self._tokenizer, messages, **self._form.options)
        except TemplateLimitError as exc:
            raise InvalidRequestError(f"the chat template of {self._model} {exc}, its limit", param="query") from exc
        # A template is a program that comes with the model: it may raise anything.
        except Exception as exc:
            raise InvalidRequestError(
                f"the chat template of {self._model} refuses the roles query and document: {exc}", param="query"
            ) from exc

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._form.structured else text}
