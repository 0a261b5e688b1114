"""Pydantic models of the routes about tokens: those of llama.cpp's server, and vLLM's forms of one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from lmx_lab.wire import unsupported
from lmx_lab.wire.chat import HELLO, ChatRequest
from lmx_lab.wire.generation import ANY_MODEL, NonEmpty
from lmx_lab.wire.messages import LenientModel


class TemplateRequest(ChatRequest):
    """The body of POST /apply-template: a chat. Parameters of the generation have no effect."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": HELLO}]})

    model: NonEmpty = ANY_MODEL
    add_generation_prompt: Annotated[Any, unsupported.NO_OPEN_CHATS] = None
    continue_final_message: Annotated[Any, unsupported.NO_CONTINUED_MESSAGES] = None


class PieceOptions(BaseModel):
    """What an answer of POST /tokenize contains besides token ids."""

    with_pieces: bool | None = None
    """Whether each token is an object with its id and its text."""
    return_token_strs: bool | None = None
    """Whether the answer has the texts of all tokens in ``token_strs``."""


class ChatTokenizeRequest(TemplateRequest, PieceOptions):
    """The body of POST /tokenize for a chat, in vLLM's form."""

    add_special_tokens: bool | None = None
    """Has no effect: the special tokens of a chat are those of its template."""


class TextTokenizeRequest(LenientModel, PieceOptions):
    """The body of POST /tokenize for a text: ``content`` in llama.cpp's form, ``prompt`` in vLLM's."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "The sea is blue."}]})

    model: NonEmpty = ANY_MODEL
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = False
    """Whether to add the special tokens that begin and end a text; for ``content``."""
    add_special_tokens: bool | None = True
    """The same for ``prompt``."""
    parse_special: Annotated[Any, unsupported.NO_PLAIN_SPECIALS] = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.content is None) == (self.prompt is None):
            raise ValueError("needs either content or prompt (or the messages of a chat)")
        return self

    @property
    def text(self) -> str:
        return self.content or self.prompt or ""

    @property
    def special(self) -> bool:
        """Whether to add the special tokens that begin and end a text."""
        return bool(self.add_special if self.prompt is None else self.add_special_tokens)


def _is_chat(body: Any) -> bool:
    return isinstance(body, ChatTokenizeRequest) or (isinstance(body, dict) and "messages" in body)


TokenizeRequest = Annotated[
    Annotated[ChatTokenizeRequest, Tag("body[chat]")] | Annotated[TextTokenizeRequest, Tag("body[text]")],
    Discriminator(lambda value: "body[chat]" if _is_chat(value) else "body[text]"),
]
TOKEN_LIMIT = 65_536
"""Largest number of token ids in one request. Decoding holds the interpreter's lock for about a microsecond each."""
TokenList = TypeAliasType(
    "TokenList", Annotated[list[Annotated[int, Field(ge=0, strict=True)]], FailFast(), Field(max_length=TOKEN_LIMIT)]
)


class DetokenizeRequest(LenientModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [300, 301, 302]}]})

    model: NonEmpty = ANY_MODEL
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
    """The answer of POST /detokenize: the text under the names of both forms."""

    content: str
    prompt: str


class TemplateAnswer(BaseModel):
    """The answer of POST /apply-template."""

    prompt: str


class GenerationSettings(BaseModel):
    """Defaults of a request."""

    n_ctx: int | None
    """Maximum number of tokens of a request, prompt and answer."""
    params: dict[str, Any]


class Modalities(BaseModel):
    """Inputs other than text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


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
