"""Pydantic models of the rerank routes: the bodies of Jina and Cohere, and of Text Embeddings Inference, and answers.

Each path has the answers of the servers whose clients use it. Documents that were sent as strings or as objects are
strings in the results of ``/v1/rerank``, and objects with ``text`` in those of the other paths.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypeAliasType

from lmx_lab.errors import counted
from lmx_lab.values.outputs import RerankMethod
from lmx_lab.wire.base import ANY_MODEL, WHOLE, AnyModel, FormatModel, Neutral, NonEmpty
from lmx_lab.wire.embeddings import INPUT_LIMIT, EncodingUsage, InputTexts

SEA = "How salty is the sea?"
PAIR: JsonValue = ["Bread needs a little salt.", "Sea water is about 3.5 percent salt."]


def _check_query(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; send the text that the documents are compared with")
    return text


Query = Annotated[str, AfterValidator(_check_query), WithJsonSchema({"type": "string", "pattern": r"\S"})]


class Document(BaseModel):
    """A document as an object. Only its text is scored; other fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    text: str
    image: Annotated[Any, Neutral("images")] = None


AnyDocument = Annotated[
    Annotated[str, Tag("str")] | Annotated[Document, Tag("dict[text]")],
    Discriminator(lambda document: "str" if isinstance(document, str) else "dict[text]"),
]
# A named type, for the reason given above TokenIds.
Documents = TypeAliasType(
    "Documents", Annotated[list[AnyDocument], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)]
)


class ScoringBody(FormatModel):
    """The unsupported fields that requests for scores share in vLLM's format. Only values without effect are valid."""

    priority: Annotated[Any, Neutral("priorities", (0,))] = None
    max_tokens_per_query: Annotated[Any, Neutral("truncated queries", (0,))] = None
    truncation_side: Annotated[Any, Neutral("truncations at the beginning of a text", ("right",))] = None
    instruction: Annotated[Any, Neutral("instructions (write them into the query)", ("",))] = None


class RerankBody(ScoringBody):
    """The body of a rerank request as Jina, Cohere and vLLM define it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "query": SEA, "documents": PAIR}]})

    model: NonEmpty
    """A reranker or an embedding model in memory; ``default`` prefers a reranker."""
    query: Query
    documents: Documents
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Number of results to return."""
    return_documents: bool | None = None
    """Whether the results contain the documents; by default, only those of ``/v2/rerank`` do not."""
    max_tokens_per_doc: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Number of tokens to which documents are truncated; 0 means no limit, as in vLLM. Documents that still do not fit
    into the model's context are truncated further."""

    # Extensions.
    truncate: bool | None = False
    """Whether to truncate documents that are too long, instead of refusing them. A query is never truncated."""
    raw_scores: bool | None = False
    """Whether to return scores without the activation."""

    # A field of the formats that has no effect here.
    user: str | None = None

    # Fields of the formats that are not supported; only the value without effect is valid.
    return_embeddings: Annotated[Any, Neutral("vectors in addition to scores", (False,))] = None
    max_chunks_per_doc: Annotated[Any, Neutral("chunks of documents (send max_tokens_per_doc)", (1,))] = None
    use_activation: Annotated[Any, Neutral("scores without the activation (send raw_scores)", (True,))] = None
    truncate_prompt_tokens: Annotated[Any, Neutral("limits of tokens per pair (send max_tokens_per_doc)")] = None
    rank_fields: Annotated[Any, Neutral("fields to rank by other than text", (["text"],))] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of all documents."""
        return tuple(item if isinstance(item, str) else item.text for item in self.documents)


class TextsRerankBody(FormatModel):
    """The body of a rerank request as Text Embeddings Inference defines it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": SEA, "texts": PAIR}]})

    model: NonEmpty | None = None
    """Not part of the format. If it is missing, the model in memory is used."""
    query: Query
    texts: InputTexts
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Number of results to return. Not part of the format, but LiteLLM sends it."""
    return_text: bool | None = False
    truncate: bool | None = False
    raw_scores: bool | None = False

    # Fields that are not supported. Only values without effect are valid.
    documents: Annotated[Any, Neutral("documents in addition to texts")] = None
    truncation_direction: Annotated[Any, Neutral("truncations at the beginning of a text", ("right", "Right"))] = None


def _body_shape(body: Any) -> str:
    # A body that was validated before is an instance of its class. If a body has neither shape, the errors are those of
    # ``RerankBody``.
    is_texts = isinstance(body, TextsRerankBody) or (isinstance(body, dict) and "texts" in body)
    return "dict[texts]" if is_texts else "dict[documents]"


AnyRerankBody = Annotated[
    Annotated[RerankBody, Tag("dict[documents]")] | Annotated[TextsRerankBody, Tag("dict[texts]")],
    Discriminator(_body_shape),
]


class RerankItem(BaseModel):
    """A document and its score."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    """Larger is better. It is between 0 and 1 if the model's files define such an activation."""
    document: str | None = None
    """Absent with ``return_documents: false``."""


class RankedText(BaseModel):
    """The text of a document in the results of ``/v2/rerank`` and ``/rerank``."""

    text: str


class RankedDocument(BaseModel):
    """A document, as an object, and its score."""

    index: int
    relevance_score: float
    document: RankedText | None = None
    """Absent with ``return_documents: false`` and, at ``/v2/rerank``, unless it is true."""


class RankingDetails(BaseModel):
    """What the answers of ``/v1/rerank`` and ``/rerank`` share."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: RerankMethod
    """How the scores were computed; ``cosine`` compares the vectors of an embedding model."""
    usage: EncodingUsage


class RerankResults(RankingDetails):
    """The answer to a ``RerankBody``, the most relevant document first; equal ones in the order of the request."""

    results: list[RerankItem]


class DocumentResults(RankingDetails):
    """The answer to a ``RerankBody`` at ``/rerank``, in the same order, as Jina and vLLM define it."""

    results: list[RankedDocument]


class CohereResults(BaseModel):
    """The answer to a ``RerankBody`` at ``/v2/rerank``, in the same order, as version 2 of Cohere's API defines it."""

    id: str
    results: list[RankedDocument]
    meta: dict[str, dict[str, JsonValue]]
    """``api_version``, ``billed_units`` and ``tokens``."""


class TextRank(BaseModel):
    """An item of the array that answers a ``TextsRerankBody``, in the same order as in ``RerankResults``."""

    index: int
    score: float
    text: str | None = None
    """Present only with ``return_text: true``."""


# Scores of pairs

# Named types, for the reason given above TokenIds.
Queries = TypeAliasType("Queries", Annotated[list[Query], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)])
ONE_OR_MORE = Discriminator(
    lambda given: "list[str]" if isinstance(given, list) else "str",
    custom_error_type="one_or_more",
    custom_error_message="must be a text or a list of texts",
)


class ScoreBody(ScoringBody):
    """The body of POST /v1/score as vLLM defines it: a query with documents, or pairs of texts."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "text_1": SEA, "text_2": PAIR}]})

    model: AnyModel = ANY_MODEL
    text_1: Annotated[Annotated[Query, Tag("str")] | Annotated[Queries, Tag("list[str]")], ONE_OR_MORE] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1")
    )
    """A query, or one for each text of the second list."""
    text_2: Annotated[Annotated[str, Tag("str")] | Annotated[InputTexts, Tag("list[str]")], ONE_OR_MORE] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2")
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """Number of tokens to which the second texts are truncated; -1 means what fits into the model's context. Without
    it, texts that are too long are refused."""
    use_activation: bool | None = True
    """Whether the activation that the model's files name is applied."""
    user: str | None = None
    max_tokens_per_doc: Annotated[Any, Neutral("limits of tokens per text (send truncate_prompt_tokens)", (0,))] = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if isinstance(self.text_1, list) and len(self.text_1) > 1 and len(self.text_1) != len(self.pairs):
            raise ValueError(
                f"text_1 has {counted(len(self.text_1), 'text')}, and text_2 {len(self.pairs)}; send one text_1, or as "
                "many as texts in text_2"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each text of the second list with its query."""
        firsts = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        seconds = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        return list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=False))


class Score(BaseModel):
    """The relevance of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    """The answer to a ``ScoreBody``, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    model: str
    data: list[Score]
    usage: EncodingUsage
