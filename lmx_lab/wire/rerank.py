"""POST /v1/rerank: Jina's and Cohere's body, or the one of Text Embeddings Inference, each with its own answer.

Results are specification section 2.6: a document is a string there, also where it came as an object.
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

from lmx_lab.wire import unsupported
from lmx_lab.wire.embeddings import INPUT_LIMIT, EncodingUsage, InputTexts
from lmx_lab.wire.generation import WHOLE, NonEmpty, RequestShape

SEA = "How salty is the sea?"
PAIR: JsonValue = ["Bread needs a little salt.", "Sea water is about 3.5 percent salt."]


def _check_query(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; say what the documents are to be relevant to")
    return text


Query = Annotated[str, AfterValidator(_check_query), WithJsonSchema({"type": "string", "pattern": r"\S"})]


class Document(BaseModel):
    """A document with fields. Only its text is scored; other fields are the caller's own and stay there."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    text: str
    image: Annotated[Any, unsupported.NO_IMAGES] = None


def _document_shape(document: Any) -> str:
    return "str" if isinstance(document, str) else "dict[text]"


AnyDocument = Annotated[
    Annotated[str, Tag("str")] | Annotated[Document, Tag("dict[text]")], Discriminator(_document_shape)
]
# As a named type, for the reason given where TokenIds is defined.
Documents = TypeAliasType(
    "Documents", Annotated[list[AnyDocument], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)]
)


class RerankBody(RequestShape):
    """Documents to be ordered by how relevant they are to a query."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "query": SEA, "documents": PAIR}]})

    model: NonEmpty
    """A reranker or an embedding model in memory; ``default`` is whichever is, a reranker first."""
    query: Query
    documents: Documents
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Leave out the results after these."""
    return_documents: bool | None = True
    """False leaves the documents out of the results."""

    # Ours.
    truncate: bool | None = False
    """Cut documents that are too long for the model, instead of refusing them. A query is never cut."""
    raw_scores: bool | None = False
    """Scores as the model's head has them."""

    # Known to the formats, changing nothing here.
    user: str | None = None

    # Known to the formats, not offered: only the value that means "no".
    max_tokens_per_doc: Annotated[Any, unsupported.NO_DOCUMENT_LIMITS] = None
    return_embeddings: Annotated[Any, unsupported.NO_VECTORS] = None
    priority: Annotated[Any, unsupported.NO_PRIORITY] = None
    max_chunks_per_doc: Annotated[Any, unsupported.NO_CHUNKS] = None
    rank_fields: Annotated[Any, unsupported.NO_RANK_FIELDS] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The documents, whichever shape they came in."""
        return tuple(item if isinstance(item, str) else item.text for item in self.documents)


class TextsRerankBody(RequestShape):
    """The same as Text Embeddings Inference has it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": SEA, "texts": PAIR}]})

    model: NonEmpty | None = None
    """The format has none: the one in memory answers."""
    query: Query
    texts: InputTexts
    return_text: bool | None = False
    truncate: bool | None = False
    raw_scores: bool | None = False

    # Known to the format, not offered: only the value that means "no".
    truncation_direction: Annotated[Any, unsupported.NO_LEFT_CUTS] = None


def _body_shape(body: Any) -> str:
    # A body that is neither is told what the first one lacks.
    return "dict[texts]" if isinstance(body, dict) and "texts" in body else "dict[documents]"


AnyRerankBody = Annotated[
    Annotated[RerankBody, Tag("dict[documents]")] | Annotated[TextsRerankBody, Tag("dict[texts]")],
    Discriminator(_body_shape),
]


class RerankItem(BaseModel):
    index: int
    """Position in the documents of the request."""
    relevance_score: float
    """Larger is better; between 0 and 1 where the model's files name such an activation."""
    document: str | None = None
    """Absent with ``return_documents: false``."""


class RerankResults(BaseModel):
    """The most relevant document comes first; of equals, the one that came first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: Literal["cross-encoder", "decoder", "cosine"]
    """How the scores came about; ``cosine`` is of two vectors by an embedding model."""
    results: list[RerankItem]
    usage: EncodingUsage


class TextRank(BaseModel):
    """A row of the bare array that answers a ``TextsRerankBody``, in the same order."""

    index: int
    score: float
    text: str | None = None
    """Only with ``return_text: true``."""
