"""Texts and pairs of texts to token ids. Runs beside the engine's thread, so nothing here touches MLX."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from lmx_lab.engine.encoders.sentence_transformers import ChatTemplateInput, EncodingPrompts
from lmx_lab.engine.templates.renderer import TemplateLimitError, render_chat
from lmx_lab.errors import ContextLengthError, InvalidRequestError, UnusableModelError
from lmx_lab.values.encoding import InputType

Text = TypeVar("Text", str, tuple[str, str])

AMPLE_CHARACTERS = 10
"""More than a token shows of ordinary text."""


@dataclass(frozen=True, kw_only=True)
class PairText:
    """What stands around every document of one query."""

    before: str
    after: str
    strip: bool = False
    """The document goes in without the white space at its ends."""


class PairFormat(Protocol):
    def frame(self, query: str) -> PairText: ...


class QwenPairFormat:
    """The prompt that Qwen3-Reranker was trained with, as its model card documents it."""

    def frame(self, query: str) -> PairText:
        judge = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        instruct = "Given a web search query, retrieve relevant passages that answer the query"
        return PairText(
            before=f"<|im_start|>system\n{judge}<|im_end|>\n<|im_start|>user\n"
            f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: ",
            after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )


class ChatPairFormat:
    """The model's chat template, rendered once for each query."""

    def __init__(self, tokenizer: Any, form: ChatTemplateInput, model: str) -> None:
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

    def frame(self, query: str) -> PairText:
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
        return PairText(before=before, after=after, strip=strip)

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


@dataclass(frozen=True)
class TextTokens:
    """One text, or a query with a document, ready to compute."""

    tokens: tuple[int, ...]
    second_start: int | None = None
    """Where the second segment begins, for pairs of models that tell segments apart."""
    skipped_tokens: int = 0
    """Leading tokens that are left out of pooling: a prompt, if the model's files say so."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What a model wants to be done to its texts."""

    context_length: int | None
    """Tokens of one text at most, special ones included."""
    vocabulary_size: int
    segments: bool = False
    """Pairs have two segments."""
    include_prompt: bool = True
    prompts: EncodingPrompts = field(default_factory=EncodingPrompts)
    lower_case: bool = False
    pairs: PairFormat | None = None
    """The text that a decoder reads about a pair; None joins pairs as the tokenizer does."""


class TextTokenizer:
    """A model's tokenizer with the model's rules. Used by one thread at a time."""

    def __init__(self, tokenizer: Any, model: str, rules: TextRules) -> None:
        """
        Args:
            tokenizer: One of transformers'; it is changed, so nobody else may use it.

        Raises:
            UnusableModelError: it is none of the fast ones.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnusableModelError("its tokenizer has no fast form; a tokenizer.json is needed")
        # The files may ask for both (all-MiniLM-L6-v2: cut and pad to 128).
        backend.no_truncation()
        backend.no_padding()
        if rules.lower_case:
            old = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = Normalizers([Lowercase(), *old])
        self._backend = backend
        self._special = frozenset(int(token) for token in tokenizer.all_special_ids)
        self._model = model
        self._rules = rules

    def texts(
        self,
        inputs: Sequence[str | tuple[int, ...]],
        *,
        input_type: InputType | None,
        truncate: bool,
        param: str = "input",
        first: int | None = 0,
    ) -> list[TextTokens]:
        """Tokens of texts to embed, the model's prompt before each. Token ids are taken as they are.

        Args:
            param: What the request calls the inputs.
            first: The number that it gives to the first one; None where there is only one.

        Raises:
            InvalidRequestError: a text with half a character, or one without tokens; a token id that there is not.
            ContextLengthError: a text is too long, and ``truncate`` is not set.
        """
        places = [param if first is None else f"{param}.{first + at}" for at in range(len(inputs))]
        prompt = self._rules.prompts.of(input_type)
        skipped_tokens = 0 if self._rules.include_prompt else self._prompt_tokens(prompt)
        texts = {at: prompt + text for at, text in enumerate(inputs) if isinstance(text, str)}
        for at, text in texts.items():
            _check_characters(text, places[at])
        encoded = self._encode(list(texts.values()), [places[at] for at in texts], truncate=truncate)
        found = {
            at: TextTokens(ids, skipped_tokens=min(skipped_tokens, len(ids) - 1))
            for at, ids in zip(texts, encoded, strict=True)
        }
        for at, tokens in enumerate(inputs):
            if not isinstance(tokens, str):
                found[at] = TextTokens(self._checked(tuple(tokens), places[at], truncate=truncate))
        return [found[at] for at in range(len(inputs))]

    def pairs(self, query: str, documents: Sequence[str], *, truncate: bool, first: int | None = 0) -> list[TextTokens]:
        """Tokens of a query with each of the documents, for rerankers. Only documents are cut.

        Raises:
            InvalidRequestError: as of ``texts``, or the model's chat template refuses the query.
            ContextLengthError: the query leaves no room, or a document is too long and ``truncate`` is not set.
        """
        places = ["documents" if first is None else f"documents.{first + at}" for at in range(len(documents))]
        _check_characters(query, "query")
        for place, document in zip(places, documents, strict=True):
            _check_characters(document, place)
        self._check_beginning(query)
        if self._rules.pairs is not None:
            return self._framed(self._rules.pairs, query, documents, places, truncate=truncate)
        query = self._rules.prompts.of(None) + query
        self._check_room(len(self._backend.encode(query, "").ids))
        whole = [(query, document) for document in documents]
        parts = [(query, self._beginning(document)) for document in documents]
        encodings = self._encodings(parts, whole)
        long = [at for at, encoding in enumerate(encodings) if self._exceeds(len(encoding.ids))]
        if long and not truncate:
            at = long[0]
            raise self._too_long(places[at], len(encodings[at].ids), cut=parts[at] != whole[at])
        if long:
            for at, encoding in zip(long, self._truncating([parts[at] for at in long], "only_second"), strict=True):
                encodings[at] = encoding
        return [self._pair(encoding) for encoding in encodings]

    def _pair(self, encoding: Any) -> TextTokens:
        kinds = encoding.type_ids
        second_start = kinds.index(1) if self._rules.segments and 1 in kinds else None
        return TextTokens(tuple(encoding.ids), second_start=second_start)

    def _framed(
        self, form: PairFormat, query: str, documents: Sequence[str], places: list[str], *, truncate: bool
    ) -> list[TextTokens]:
        frame = form.frame(query)
        self._check_room(len(self._backend.encode(frame.before + frame.after, add_special_tokens=False).ids))
        if frame.strip:
            documents = [document.strip() for document in documents]
        whole = [frame.before + document + frame.after for document in documents]
        parts = [frame.before + self._beginning(document) + frame.after for document in documents]
        found = [encoding.ids for encoding in self._encodings(parts, whole, special=False)]
        for at, ids in enumerate(found):
            if self._exceeds(len(ids)):
                if not truncate:
                    raise self._too_long(places[at], len(ids), cut=parts[at] != whole[at])
                found[at] = self._fitting(frame, parts[at][len(frame.before) : len(parts[at]) - len(frame.after)])
        return [TextTokens(tuple(ids)) for ids in found]

    def _fitting(self, frame: PairText, document: str) -> list[int]:
        """As much of the document as there is room for, joined again each time, since tokens reach over the seams."""
        context = self._rules.context_length
        while True:
            text = frame.before + document + frame.after
            encoding = self._backend.encode(text, add_special_tokens=False)
            excess = len(encoding.ids) - (context or 0)
            if context is None or excess <= 0 or not document:
                return list(encoding.ids)
            starts = [start - len(frame.before) for start, _ in encoding.offsets]
            inside = [start for start in starts if 0 <= start < len(document)]
            document = document[: min(inside[-excess:], default=0)]

    def _encode(self, texts: list[str], places: list[str], *, truncate: bool) -> list[tuple[int, ...]]:
        beginnings = [self._beginning(text) for text in texts]
        found = [encoding.ids for encoding in self._encodings(beginnings, texts)]
        long = [at for at, ids in enumerate(found) if self._exceeds(len(ids))]
        if long and not truncate:
            raise self._too_long(places[long[0]], len(found[long[0]]), cut=beginnings[long[0]] != texts[long[0]])
        if long:
            cut = self._truncating([beginnings[at] for at in long], "longest_first")
            for at, encoding in zip(long, cut, strict=True):
                found[at] = encoding.ids
        for ids, place in zip(found, places, strict=True):
            if not ids:
                raise InvalidRequestError(f"{place} is empty: no token came out of it", param=place)
        return [tuple(ids) for ids in found]

    def _encodings(self, beginnings: list[Text], whole: Sequence[Text], *, special: bool = True) -> list[Any]:
        """Of what is longer than its beginning, no more than shows that it is too long; else its whole, also there."""
        found = list(self._backend.encode_batch_fast(beginnings, add_special_tokens=special))
        for at, text in enumerate(whole):
            if beginnings[at] != text and not self._exceeds(len(found[at].ids)):
                beginnings[at] = text
                found[at] = self._backend.encode_batch_fast([text], add_special_tokens=special)[0]
        return found

    def _truncating(self, texts: Sequence[str | tuple[str, str]], strategy: str) -> list[Any]:
        self._backend.enable_truncation(self._rules.context_length, strategy=strategy)
        try:
            return list(self._backend.encode_batch_fast(texts))
        finally:
            self._backend.no_truncation()

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens at the front of a text that belong to its prompt, a special one at the very front included."""
        if not prompt:
            return 0
        ids = self._backend.encode(prompt).ids
        return len(ids) - 1 if ids and ids[-1] in self._special else len(ids)

    def _checked(self, tokens: tuple[int, ...], place: str, *, truncate: bool) -> tuple[int, ...]:
        if not tokens:
            raise InvalidRequestError(f"{place} is empty: send at least one token", param=place)
        known = self._rules.vocabulary_size
        wrong = next((token for token in tokens if not 0 <= token < known), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"{place} has the token id {wrong}; {self._model} knows 0 to {known - 1}", param=place
            )
        if self._exceeds(len(tokens)) and not truncate:
            raise self._too_long(place, len(tokens), cut=False)
        return tokens[: self._rules.context_length]

    def _check_beginning(self, query: str) -> None:
        beginning = self._beginning(query)
        if beginning != query:
            tokens = len(self._backend.encode(beginning).ids)
            if self._exceeds(tokens):
                self._check_room(tokens, cut=True)

    def _check_room(self, tokens: int, *, cut: bool = False) -> None:
        """Whether a query leaves at least one token to a document."""
        context = self._rules.context_length
        if context is not None and tokens >= context:
            raise ContextLengthError(
                f"query has {'more than ' if cut else ''}{tokens} tokens and {self._model} takes {context} in all, the "
                "document included; shorten the query",
                param="query",
            )

    def _beginning(self, text: str) -> str:
        # Others wait while a text becomes tokens: eight megabytes would take 13 s (measured).
        context = self._rules.context_length
        return text if context is None else text[: context * AMPLE_CHARACTERS]

    def _exceeds(self, tokens: int) -> bool:
        return self._rules.context_length is not None and tokens > self._rules.context_length

    def _too_long(self, place: str, tokens: int, *, cut: bool) -> ContextLengthError:
        return ContextLengthError(
            f"{place} has {'more than ' if cut else ''}{tokens} tokens and {self._model} takes "
            f"{self._rules.context_length}; shorten it{'' if place == 'query' else ' or send truncate: true'}",
            param=place,
        )


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        what = f"the lone surrogate {exc.object[exc.start]!r}, which is no character"
        raise InvalidRequestError(f"{place} has {what}", param=place) from exc
