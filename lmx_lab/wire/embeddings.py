"""Pydantic models of POST /v1/embeddings, the embeddings format of OpenAI's API with two extensions, and of the routes
in the formats of Cohere, llama.cpp's server and Text Embeddings Inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, Tag
from typing_extensions import TypeAliasType

from lmx_lab.wire.base import ANY_MODEL, WHOLE, AnyModel, FormatModel, Neutral, NonEmpty
from lmx_lab.wire.completions import BY_SHAPE, TokenIds

INPUT_LIMIT = 16_384
"""Largest number of texts in one request, also for reranking."""
# Named types, for the reason given above TokenIds.
InputTexts = TypeAliasType("InputTexts", Annotated[list[str], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)])
InputTokens = TypeAliasType(
    "InputTokens", Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=INPUT_LIMIT)]
)
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[InputTexts, Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[InputTokens, Tag("list[list]")],
    BY_SHAPE,
]
Purpose = Literal["query", "document", "search_query", "search_document"]


def is_single_input(given: Input) -> bool:
    """Return whether an input is a single text, or the token ids of a single text."""
    return isinstance(given, str) or isinstance(given[0], int)


def listed_inputs(given: Input) -> Iterable[Any]:
    """Return the texts of an input, or their token ids."""
    # Token ids stay lists: copies of 16,384 lists would delay other requests by 20 ms.
    return [given] if is_single_input(given) else given


class EmbeddingsBody(FormatModel):
    """The body of POST /v1/embeddings."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "default", "input": ["The sea is blue.", "Bread is baked."]}]}
    )

    model: NonEmpty
    """An embedding model in memory; ``default`` is the one in memory."""
    input: Input
    """A text, texts, the token ids of one text, or those of several."""
    encoding_format: Literal["float", "base64"] | None = "float"
    """``base64`` encodes little-endian float32."""
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Number of leading components to keep; the shortened vectors are normalized again."""

    # Extensions.
    truncate: bool | None = False
    """Whether to truncate texts that are too long for the model, instead of refusing them."""
    input_type: Purpose | None = None
    """The model's prompt to put before each text; the longer names are Cohere's."""

    # A field of the format that has no effect here.
    user: str | None = None

    # Fields of vLLM and Jina that are not supported. Only values without effect are valid.
    truncate_prompt_tokens: Annotated[Any, Neutral("limits of tokens per text (send truncate)")] = None
    add_special_tokens: Annotated[Any, Neutral("texts without special tokens", (True,))] = None
    normalize: Annotated[Any, Neutral("vectors that are not normalized (use /embedding)", (True,))] = None
    normalized: Annotated[Any, Neutral("vectors that are not normalized (use /embedding)", (True,))] = None
    embed_dtype: Annotated[Any, Neutral("other number types", ("float32",))] = None
    endianness: Annotated[Any, Neutral("other byte orders", ("native", "little"))] = None
    task: Annotated[Any, Neutral("tasks (send input_type)")] = None
    late_chunking: Annotated[Any, Neutral("vectors of chunks", (False,))] = None

    @property
    def is_single(self) -> bool:
        """Whether the input is a single text, or the token ids of a single text."""
        return is_single_input(self.input)


class EncodingUsage(BaseModel):
    """Number of tokens of a request without generation."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    """Index of the input."""
    embedding: list[float] | str
    """A list of numbers, or base64 if requested."""


class EmbeddingList(BaseModel):
    """The answer of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EncodingUsage


EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
EmbeddingTypes = TypeAliasType(
    "EmbeddingTypes", Annotated[list[EmbeddingType], FailFast(), Field(min_length=1, max_length=4)]
)


class CohereEmbedBody(FormatModel):
    """The body of POST /v2/embed, as version 2 of Cohere's API defines it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "default", "texts": ["The sea is blue."]}]})

    model: NonEmpty
    texts: InputTexts
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    """``search_query`` and ``search_document`` put the model's prompt of this kind before each text."""
    embedding_types: EmbeddingTypes | None = None
    """``binary`` and ``ubinary`` have one bit for each number, which is 1 if the number is above 0."""
    output_dimension: Annotated[int, Field(ge=1), WHOLE] | None = None
    truncate: Literal["NONE", "END"] | None = "END"
    """``NONE`` refuses texts that are too long for the model."""

    # Not supported; only the values without effect are valid.
    inputs: Annotated[Any, Neutral("inputs other than texts", ([],))] = None
    images: Annotated[Any, Neutral("images", ([],))] = None
    max_tokens: Annotated[Any, Neutral("limits of tokens per text")] = None
    priority: Annotated[Any, Neutral("priorities", (0,))] = None


class CohereEmbeddings(BaseModel):
    """The answer of POST /v2/embed."""

    id: str
    embeddings: dict[EmbeddingType, list[list[float]] | list[str]]
    """The vectors of all texts in each requested form: numbers, base64 of little-endian float32, or bytes of
    eight bits each (reduced by 128 for ``binary``)."""
    texts: list[str]
    meta: dict[str, dict[str, JsonValue]]
    """``api_version`` and ``billed_units``."""
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class LlamaEmbedBody(FormatModel):
    """The body of llama.cpp's POST /embedding. Other fields are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "The sea is blue."}]})

    model: AnyModel = ANY_MODEL
    content: Input
    """As ``input`` of POST /v1/embeddings."""
    embd_normalize: Literal[-1, 2] | None = 2
    """2 returns vectors of length 1, and -1 vectors as the model's files define them. No other norms are supported."""


class LlamaEmbedding(BaseModel):
    """An item of the answer of POST /embedding."""

    index: int
    embedding: list[list[float]]
    """The vector of the input, as the only item of a list."""


class TeiEmbedBody(FormatModel):
    """The body of POST /embed, as Text Embeddings Inference defines it. Other fields are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": ["The sea is blue.", "Bread is baked."]}]})

    model: AnyModel = ANY_MODEL
    inputs: Input
    """As ``input`` of POST /v1/embeddings."""
    truncate: bool | None = False
    """Whether to truncate texts that are too long for the model, instead of refusing them."""
    truncation_direction: Annotated[Any, Neutral("texts without their beginning", ("right", "Right"))] = None
    normalize: bool | None = True
    """Whether to return vectors of length 1. Otherwise they are as the model's files define them."""
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    prompt_name: Literal["query", "document"] | None = None
    """The model's prompt to put before each text."""
