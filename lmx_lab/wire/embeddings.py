"""POST /v1/embeddings: the chat format's own shapes, specification section 2.5, and three fields of ours."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from lmx_lab.wire.completions import TokenIds, shape_of
from lmx_lab.wire.generation import WHOLE, NonEmpty, RequestShape

INPUT_LIMIT = 16_384
"""Texts in one request, of reranking too."""
# As named types, for the reason given where TokenIds is defined.
InputTexts = TypeAliasType("InputTexts", Annotated[list[str], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)])
InputTokens = TypeAliasType(
    "InputTokens", Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)]
)
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[InputTexts, Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[InputTokens, Tag("list[list]")],
    Discriminator(shape_of),
]
Purpose = Literal["query", "document", "search_query", "search_document"]


class EmbeddingsBody(RequestShape):
    """Texts, or the token ids of texts, whose vectors are wanted."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": ["The sea is blue.", "Bread is baked."]}]}
    )

    model: NonEmpty
    """An embedding model in memory; ``default`` is whichever is."""
    input: Input
    """A text, texts, the token ids of one text, or those of several."""
    encoding_format: Literal["float", "base64"] | None = "float"
    """``base64`` is of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Keep so many leading components and normalize again."""

    # Ours.
    truncate: bool | None = False
    """Cut what is too long for the model, instead of refusing it."""
    input_type: Purpose | None = None
    """Which of the model's prompts goes before each text; the longer names are Cohere's words for the same."""

    # Known to the format, changing nothing here.
    user: str | None = None

    @property
    def is_single(self) -> bool:
        """Whether the input is one text, or the token ids of one, and not a list of them."""
        return isinstance(self.input, str) or isinstance(self.input[0], int)


class EncodingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    """Which of the inputs."""
    embedding: list[float] | str
    """Base64, where that was asked for."""


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EncodingUsage
