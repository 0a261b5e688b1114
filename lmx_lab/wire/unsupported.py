"""Fields of the formats that this server does not support: refused by name unless their value has no effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, WithJsonSchema


@dataclass(frozen=True)
class Neutral:
    """An annotation for such a field, which accepts null and the values without effect.

    Args:
        what: The unsupported feature, in the plural, for the message.
        values: Accepted values in addition to null.
    """

    what: str
    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = {"enum": [None, *self.values], "description": f"Not supported: {self.what}"}
        return handler.generate_schema(Annotated[Any, AfterValidator(self._check), WithJsonSchema(schema)])

    def _check(self, value: Any) -> Any:
        # In Python, False equals 0.
        is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)
        if value is not None and not is_neutral:
            raise ValueError(f"{self.what} are not supported by this version; leave the field out")
        return value


NO_FUNCTIONS = Neutral("functions (send tools, which replaced them)", ([],))
NO_FUNCTION_CHOICE = Neutral("choices of functions (send tools and tool_choice, which replaced them)", ("none", "auto"))
NO_FUNCTION_CALL = Neutral("function calls in messages (send tool_calls, which replaced them)")
NO_VERBOSITY = Neutral("levels of verbosity", ("medium",))
NO_AUDIO = Neutral("audio inputs and outputs")
NO_MODALITIES = Neutral("modalities other than text", (["text"],))
NO_PREDICTION = Neutral("predicted outputs")
NO_SEARCH = Neutral("web searches")
NO_MODERATION = Neutral("moderations")
NO_REFUSAL = Neutral("refusals outside the content")
NO_ANNOTATIONS = Neutral("annotations", ([],))
NO_TYPICAL_P = Neutral("locally typical samplers", (1,))
NO_DYNAMIC_TEMPERATURE = Neutral("dynamic temperatures", (0,))
NO_XTC = Neutral("XTC samplers", (0,))
NO_DRY = Neutral("DRY penalties", (0,))
NO_MIROSTAT = Neutral("Mirostat samplers", (0,))
NO_REASONING_FORMAT = Neutral("other reasoning formats", ("auto", "deepseek"))
NO_IMAGES = Neutral("images")
NO_OPEN_CHATS = Neutral("prompts without the generation prompt", (True,))
NO_CONTINUED_MESSAGES = Neutral("continuations of the last message", (False,))
NO_PLAIN_SPECIALS = Neutral("texts whose special tokens are read as plain text", (True,))
NO_VISION = Neutral("images (the models of this server have no vision; send text only)", ([],))
NO_OWN_TEMPLATES = Neutral("templates in requests (the model's own is used; with raw: true none is used)", ("",))
NO_TOKEN_CONTEXTS = Neutral("token contexts (send the conversation as messages to /api/chat)", ([],))
NO_DOCUMENT_LIMITS = Neutral("token limits for documents (truncate: true cuts at the model's own limit)")
NO_VECTORS = Neutral("vectors in addition to scores", (False,))
NO_PRIORITY = Neutral("priorities", (0,))
NO_CHUNKS = Neutral("chunks of documents")
NO_RANK_FIELDS = Neutral("fields to rank by other than text", (["text"],))
NO_LEFT_CUTS = Neutral("truncations at the beginning of a text", ("right", "Right"))
