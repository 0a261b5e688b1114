"""Pydantic models of llama.cpp's routes for tokens and the loaded model, and of vLLM's bodies of ``/tokenize``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import TOKEN_LIMIT
from lmx_lab.wire.base import ANY_MODEL, AnyModel, FormatModel, Neutral
from lmx_lab.wire.chat import HELLO, MESSAGE_LIMIT, ChatMessage, ChatRequest, TemplateVariables
from lmx_lab.wire.tools import Tools, check_counts


class TemplateRequest(ChatRequest):
    """The body of POST /apply-template: a chat. Parameters of the generation have no effect."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": HELLO}]})


# A named type, because members of a union must be hashable, and FailFast is not.
ChatMessages = TypeAliasType(
    "ChatMessages",
    Annotated[
        list[ChatMessage], FailFast(), Field(min_length=1, max_length=MESSAGE_LIMIT), BeforeValidator(check_counts)
    ],
)


class TokenizeRequest(FormatModel):
    """The body of POST /tokenize: a text as ``content`` in llama.cpp's form or as ``prompt`` in vLLM's, or a chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "The sea is blue."}]})

    model: AnyModel = ANY_MODEL
    content: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special: bool | None = False
    """Whether to add the special tokens that begin and end a text; for ``content``."""
    add_special_tokens: bool | None = True
    """The same for ``prompt``. The special tokens of a chat are those of its template."""
    parse_special: Annotated[Any, Neutral("texts whose special tokens are read as plain text", (True,))] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    with_pieces: bool | None = None
    """Whether each token is an object with its id and its text."""
    return_token_strs: bool | None = None
    """Whether the answer has the texts of all tokens in ``token_strs``."""

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        given = [name for name in ("content", "prompt", "messages") if getattr(self, name) is not None]
        if not given:
            raise ValueError("the request has neither content nor prompt nor messages; send one of them")
        if len(given) > 1:
            raise ValueError(f"the request has {' and '.join(given)}; send only one of them")
        return self

    @property
    def text(self) -> str | None:
        """The text; None for a chat."""
        return self.prompt if self.content is None else self.content

    @property
    def special(self) -> bool:
        """Whether to add the special tokens that begin and end a text."""
        return bool(self.add_special if self.prompt is None else self.add_special_tokens)


TokenList = TypeAliasType(
    "TokenList", Annotated[list[Annotated[int, Field(ge=0, strict=True)]], FailFast(), Field(max_length=TOKEN_LIMIT)]
)


class DetokenizeRequest(FormatModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [300, 301, 302]}]})

    model: AnyModel = ANY_MODEL
    tokens: TokenList


class TokenPiece(BaseModel):
    """A token and its text."""

    id: int
    piece: str | list[int]
    """The bytes of the token if they are not whole characters."""


class TokenizeAnswer(BaseModel):
    """The answer of POST /tokenize."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int | None
    """Maximum number of tokens of a request, prompt and answer."""
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    """The answer of POST /detokenize: the text under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str


class TemplateAnswer(BaseModel):
    """The answer of POST /apply-template."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The answer of GET /tokenizer_info: the tokenizer of the loaded model, as in ``tokenizer_config.json``."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str
    model_max_length: int | None
    """Maximum number of tokens of a request, prompt and answer."""


class GenerationSettings(BaseModel):
    """Defaults of a request."""

    n_ctx: int | None
    """Maximum number of tokens of a request, prompt and answer."""
    params: dict[str, Any]


class Modalities(BaseModel):
    """Inputs other than text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class Slot(BaseModel):
    """An item of the answer of GET /slots."""

    id: int
    n_ctx: int | None
    """Maximum number of tokens of a request, prompt and answer."""
    is_processing: bool
    """Slots have no identity on this server, so the running answers are assigned to the lowest ids."""


class Props(BaseModel):
    """The answer of GET /props: the loaded model."""

    default_generation_settings: GenerationSettings
    total_slots: int | None
    model_alias: str
    model_path: str
    """For callers on other machines the id of the model."""
    chat_template: str
    modalities: Modalities
    build_info: str


class VersionAnswer(BaseModel):
    """The answer of GET /version."""

    version: str
