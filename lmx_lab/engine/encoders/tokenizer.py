"""Convert texts, and pairs of query and document, to token ids. Runs outside the engine thread and never uses MLX."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from lmx_lab.engine.encoders.sentence_transformers import ChatTemplateInput, EncodingPrompts
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.engine.texts import TextTokens
from lmx_lab.engine.tokenizing.encoder import TextEncoder
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, render_chat
from lmx_lab.engine.tokenizing.worker import EncodedText
from lmx_lab.engine.validation import check_characters, check_size, check_token_ids, context_error, text_too_long
from lmx_lab.errors import ContextLengthError, InvalidRequestError, UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import InputType

Text = TypeVar("Text", str, tuple[str, str])

CHARACTERS_PER_TOKEN = 10
"""More than a token stands for in ordinary text."""


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """The text around every document of one query."""

    before: str
    after: str
    strip: bool = False
    """Whether whitespace at both ends of the document is removed."""


PairFormat = Callable[[str], Awaitable[PairTemplate]]
"""Returns the text around the documents of a query, for decoders."""


async def qwen_pairs(query: str) -> PairTemplate:
    """Return the prompt that Qwen3-Reranker was trained with, as documented in its model card."""
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    return PairTemplate(
        before=f"<|im_start|>system\n{judge}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: ",
        after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )


class ChatPairFormat:
    """The model's chat template, rendered once per query. Creating it blocks.

    Raises:
        UnusableModelError: the template, which is rendered as a test, fails or does not show query and document.
    """

    def __init__(self, tokenizer: Any, input_: ChatTemplateInput, model: str) -> None:
        self._tokenizer = tokenizer
        self._input = input_
        self._model = model
        try:
            template = shared_pool().portal.run(self.template(probe := uuid.uuid4().hex))
        except InvalidRequestError as exc:
            raise UnusableModelError(exc.message) from exc
        if probe not in template.before + template.after:
            raise UnusableModelError("its chat template does not show a message with the role query")

    async def template(self, query: str) -> PairTemplate:
        """Return the text around the documents of a query.

        Raises:
            InvalidRequestError: the template rejects this query.
        """
        mark = uuid.uuid4().hex
        # Whitespace around the mark shows whether the template strips documents.
        document = f"\n {mark} \n"
        messages = [self._message("query", query), self._message("document", document)]
        if self._input.system:
            messages.insert(0, self._message("system", self._input.system))
        try:
            text = await render_chat(self._tokenizer, messages, **self._input.options)
        except TemplateLimitError as exc:
            raise InvalidRequestError(f"the chat template of {self._model} {exc}", param="query") from exc
        # A template is a program that comes with the model: it may raise any exception.
        except Exception as exc:
            raise InvalidRequestError(
                f"the chat template of {self._model} rejects the roles query and document: {exc}", param="query"
            ) from exc
        strip = document not in text
        before, found, after = text.partition(mark if strip else document)
        if not found:
            raise InvalidRequestError(f"the chat template of {self._model} does not show the document", param="query")
        return PairTemplate(before=before, after=after, strip=strip)

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._input.structured else text}


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """How a model's texts are converted to tokens."""

    context_length: int | None
    """Largest number of tokens of one text, including special ones."""
    vocabulary_size: int
    segments: bool = False
    """Whether pairs have two segments."""
    include_prompt: bool = True
    """Whether the tokens of a prompt are also pooled."""
    prompts: EncodingPrompts = field(default_factory=EncodingPrompts)
    lower_case: bool = False
    pairs: PairFormat | None = None
    """How a decoder reads a pair; None if the tokenizer joins pairs itself."""


class TextTokenizer:
    """A model's tokenizer, with the model's rules. May be used on any loop.

    Args:
        tokenizer: A tokenizer of transformers. It is modified, so no other code may use it.
        entry: The model, for messages.

    Raises:
        UnusableModelError: it is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any, entry: ModelEntry, rules: TextRules) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnusableModelError("its tokenizer has no fast version; a tokenizer.json is required")
        # The files may enable both: all-MiniLM-L6-v2 cuts and pads to 128.
        backend.no_truncation()
        backend.no_padding()
        if rules.lower_case:
            old = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = Normalizers([Lowercase(), *old])
        self._encoder = TextEncoder(backend, entry.id)
        self._special = frozenset(int(token) for token in tokenizer.all_special_ids)
        self._entry = entry
        self._rules = rules

    async def texts(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        input_type: InputType | None,
        truncate: bool,
        param: str = "input",
        first: int | None = 0,
    ) -> list[TextTokens]:
        """Convert texts to embed, each after the model's prompt. Inputs that are token ids are used unchanged.

        Args:
            param: Name of the inputs in the request.
            first: Index of the first input in the request; None if there is only one and it has no index.

        Raises:
            InvalidRequestError: a text contains a lone surrogate or has no tokens, or a token id is out of range.
            ContextLengthError: a text is too long, and ``truncate`` is False.
        """
        places = [param if first is None else f"{param}.{first + at}" for at in range(len(inputs))]
        prompt = self._rules.prompts.prompt_for(input_type)
        skipped_tokens = 0
        if prompt and not self._rules.include_prompt:
            prompt_ids = (await self._encoder.encode([prompt], param="input"))[0].ids
            # A special token at the beginning belongs to the prompt; one at the end does not.
            skipped_tokens = len(prompt_ids) - bool(prompt_ids and prompt_ids[-1] in self._special)
        texts = {at: prompt + text for at, text in enumerate(inputs) if isinstance(text, str)}
        for at, text in texts.items():
            check_characters(text, places[at])
        text_places = [places[at] for at in texts]
        encoded = await self._fitting(
            [self._beginning(text) for text in texts.values()],
            list(texts.values()),
            text_places,
            param=text_places[0] if len(texts) == 1 else "input",
            truncation="longest_first" if truncate else None,
        )
        found: dict[int, TextTokens] = {}
        for at, encoding in zip(texts, encoded, strict=True):
            if not encoding.ids:
                raise InvalidRequestError(
                    f"{places[at]} is empty: the tokenizer returned no tokens for it", param=places[at]
                )
            found[at] = TextTokens(tuple(encoding.ids), skipped_tokens=min(skipped_tokens, len(encoding.ids) - 1))
        for at, tokens in enumerate(inputs):
            if isinstance(tokens, str):
                continue
            if not tokens:
                raise InvalidRequestError(f"{places[at]} is empty: send at least one token", param=places[at])
            check_token_ids(tokens, places[at], self._entry, self._rules.vocabulary_size)
            if self._exceeds(len(tokens)) and not truncate:
                raise self._too_long(places[at], len(tokens), cut=False)
            found[at] = TextTokens(tuple(tokens[: self._rules.context_length]))
        return [found[at] for at in range(len(inputs))]

    async def pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool,
        first: int | None = 0,
    ) -> list[TextTokens]:
        """Convert a query with each of the documents, for rerankers. Only documents are truncated.

        Raises:
            InvalidRequestError: a text contains a lone surrogate, or the model's chat template rejects the query.
            ContextLengthError: the query leaves no room, or a document is too long and ``truncate`` is False.
        """
        places = ["documents" if first is None else f"documents.{first + at}" for at in range(len(documents))]
        check_characters(query, "query")
        for place, document in zip(places, documents, strict=True):
            check_characters(document, place)
        if (beginning := self._beginning(query)) != query:
            tokens = (await self._encoder.encode([beginning], param="query"))[0].length
            if self._exceeds(tokens):
                self._check_room(tokens, cut=True)
            self._check_size(query, "query")
        if self._rules.pairs is not None:
            return await self._template_pairs(self._rules.pairs, query, documents, places, truncate=truncate)
        query = self._rules.prompts.prompt_for(None) + query
        self._check_room((await self._encoder.encode([(query, "")], param="query"))[0].length)
        whole = [(query, document) for document in documents]
        parts = [(query, self._beginning(document)) for document in documents]
        truncation = "only_second" if truncate else None
        encodings = await self._fitting(parts, whole, places, param="documents", truncation=truncation)
        starts = [encoding.second_start if self._rules.segments else None for encoding in encodings]
        return [
            TextTokens(tuple(encoding.ids), second_start=start)
            for encoding, start in zip(encodings, starts, strict=True)
        ]

    async def beginnings(self, texts: Sequence[str], tokens: int) -> list[str]:
        """Return the beginnings of texts, up to a number of tokens. Texts of unusually long tokens are cut earlier.

        Raises:
            InvalidRequestError: the tokenizer takes too long, or fails.
        """
        # No text that fits into the model's context is longer.
        tokens = min(tokens, self._rules.context_length or tokens)
        parts = [text[: tokens * CHARACTERS_PER_TOKEN] for text in texts]
        encoded = await self._encoder.encode(parts, param="documents", special=False, keep=tokens + 1, starts=True)
        return [
            part if encoding.length <= tokens else part[: encoding.starts[tokens]]
            for part, encoding in zip(parts, encoded, strict=True)
        ]

    async def _template_pairs(
        self,
        format: PairFormat,
        query: str,
        documents: Sequence[str],
        places: list[str],
        *,
        truncate: bool,
    ) -> list[TextTokens]:
        template = await format(query)
        around = await self._encoder.encode([template.before + template.after], param="query", special=False)
        self._check_room(around[0].length)
        if template.strip:
            documents = [document.strip() for document in documents]
        whole = [template.before + document + template.after for document in documents]
        beginnings = [self._beginning(document) for document in documents]
        parts = [template.before + beginning + template.after for beginning in beginnings]
        encodings = await self._encodings(parts, whole, param="documents", special=False)
        found = [encoding.ids for encoding in encodings]
        for at, encoding in enumerate(encodings):
            if self._exceeds(encoding.length):
                if not truncate:
                    raise self._too_long(places[at], encoding.length, cut=parts[at] != whole[at])
                document = parts[at][len(template.before) : len(parts[at]) - len(template.after)]
                found[at] = await self._fit_document(template, document)
        return [TextTokens(tuple(ids)) for ids in found]

    async def _fit_document(self, template: PairTemplate, document: str) -> list[int]:
        """Return the tokens with as much of the document as fits.

        The text is tokenized again after each cut, because tokens can span the ends of the document.
        """
        context = self._rules.context_length
        while True:
            text = template.before + document + template.after
            encoding = (await self._encoder.encode([text], param="documents", special=False, starts=True))[0]
            excess = encoding.length - (context or 0)
            if context is None or excess <= 0 or not document:
                return encoding.ids
            starts = [start - len(template.before) for start in encoding.starts]
            inside = [start for start in starts if 0 <= start < len(document)]
            document = document[: min(inside[-excess:], default=0)]

    async def _fitting(
        self,
        beginnings: list[Text],
        whole: Sequence[Text],
        places: Sequence[str],
        *,
        param: str,
        truncation: str | None,
    ) -> list[EncodedText]:
        """Encode texts, and truncate those that are too long.

        Args:
            truncation: The strategy of the tokenizer; None refuses texts that are too long.
        """
        found, context = await self._encodings(beginnings, whole, param=param), self._rules.context_length
        long = [at for at, encoding in enumerate(found) if self._exceeds(encoding.length)]
        if not long or context is None:
            return found
        if truncation is None:
            at = long[0]
            raise self._too_long(places[at], found[at].length, cut=beginnings[at] != whole[at])
        texts = [beginnings[at] for at in long]
        cut = await self._encoder.encode(texts, param=param, truncation=(context, truncation))
        for at, encoding in zip(long, cut, strict=True):
            found[at] = encoding
        return found

    async def _encodings(
        self, beginnings: list[Text], whole: Sequence[Text], *, param: str, special: bool = True
    ) -> list[EncodedText]:
        """Encode the beginnings, and the whole text where the beginning fits into the context.

        ``beginnings`` is updated with the texts that were encoded.
        """
        context = self._rules.context_length
        found = await self._encoder.encode(beginnings, param=param, special=special, keep=context)
        for at, text in enumerate(whole):
            if beginnings[at] != text and not self._exceeds(found[at].length):
                self._check_size(text, param)
                beginnings[at] = text
                (found[at],) = await self._encoder.encode([text], param=param, special=special, keep=context)
        return found

    def _check_size(self, text: str | tuple[str, str], param: str) -> None:
        if (context := self._rules.context_length) is not None:
            check_size(text, context, self._entry.id, param)

    def _check_room(self, tokens: int, *, cut: bool = False) -> None:
        """Check that a query leaves room for at least one token of a document."""
        context = self._rules.context_length
        if context is not None and tokens >= context:
            raise context_error(
                f"query is too long: {'more than ' if cut else ''}{tokens} tokens leave no room for a document",
                f"{self._entry.id}, including the document",
                context,
                "shorten the query",
                param="query",
            )

    def _beginning(self, text: str) -> str:
        # Other requests wait while a text is tokenized: 8 MB would take 13 s (measured).
        context = self._rules.context_length
        return text if context is None else text[: context * CHARACTERS_PER_TOKEN]

    def _exceeds(self, tokens: int) -> bool:
        return self._rules.context_length is not None and tokens > self._rules.context_length

    def _too_long(self, place: str, tokens: int, *, cut: bool) -> ContextLengthError:
        assert self._rules.context_length is not None
        found = f"more than {tokens}" if cut else str(tokens)
        return text_too_long(place, found, self._entry, self._rules.context_length)
