"""Pydantic models of POST /v1/rerank: the bodies of Jina and Cohere, and of Text Embeddings Inference, and answers.

In results, documents are strings, even if they were sent as objects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    WithJsonSchema,
)
from typing_extensions import TypeAliasType

from lmx_lab.values.outputs import RerankMethod
from lmx_lab.wire.base import WHOLE, Neutral, NonEmpty, RequestModel
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


class RerankBody(RequestModel):
    """The body of POST /v1/rerank as Jina and Cohere define it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "query": SEA, "documents": PAIR}]})

    model: NonEmpty
    """A reranker or an embedding model in memory; ``default`` prefers a reranker."""
    query: Query
    documents: Documents
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Number of results to return."""
    return_documents: bool | None = True
    """Whether the results contain the documents."""

    # Extensions.
    truncate: bool | None = False
    """Whether to truncate documents that are too long, instead of refusing them. A query is never truncated."""
    raw_scores: bool | None = False
    """Whether to return scores without the activation."""

    # A field of the formats that has no effect here.
    user: str | None = None

    # Fields of the formats that are not supported; only the value without effect is valid.
    max_tokens_per_doc: Annotated[
        Any, Neutral("token limits for documents (truncate: true cuts at the model's own limit)")
    ] = None
    return_embeddings: Annotated[Any, Neutral("vectors in addition to scores", (False,))] = None
    priority: Annotated[Any, Neutral("priorities", (0,))] = None
    max_chunks_per_doc: Annotated[Any, Neutral("chunks of documents")] = None
    rank_fields: Annotated[Any, Neutral("fields to rank by other than text", (["text"],))] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of all documents."""
        return tuple(item if isinstance(item, str) else item.text for item in self.documents)


class TextsRerankBody(RequestModel):
    """The body of POST /v1/rerank as Text Embeddings Inference defines it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": SEA, "texts": PAIR}]})

    model: NonEmpty | None = None
    """Not part of the format. If it is missing, the model in memory is used."""
    query: Query
    texts: InputTexts
    return_text: bool | None = False
    truncate: bool | None = False
    raw_scores: bool | None = False

    # A field of the format that is not supported; only the value without effect is valid.
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


class RerankResults(BaseModel):
    """The answer to a ``RerankBody``, the most relevant document first; equal ones in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: RerankMethod
    """How the scores were computed; ``cosine`` compares the vectors of an embedding model."""
    results: list[RerankItem]
    usage: EncodingUsage


class TextRank(BaseModel):
    """An item of the array that answers a ``TextsRerankBody``, in the same order as in ``RerankResults``."""

    index: int
    score: float
    text: str | None = None
    """Present only with ``return_text: true``."""
