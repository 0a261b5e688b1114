"""What the formats know and this server does not offer: refused in words of its own, unless it says "no" anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, WithJsonSchema


@dataclass(frozen=True)
class Neutral:
    """Annotates such a field, which then takes null and the values that change nothing.

    Args:
        what: Cannot be had, in the plural, for the message.
        values: Beside null.
    """

    what: str
    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        shown = {"enum": [None, *self.values], "description": f"Not supported: {self.what}"}
        return handler.generate_schema(Annotated[Any, AfterValidator(self._check), WithJsonSchema(shown)])

    def _check(self, value: Any) -> Any:
        # To Python False is 0, and 0 is False.
        is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)
        if value is not None and not is_neutral:
            raise ValueError(f"{self.what} are not supported by this version; leave the field out")
        return value


NO_FUNCTIONS = Neutral("functions (send tools, which took their place)", ([],))
NO_FUNCTION_CHOICE = Neutral(
    "choices of functions (send tools and tool_choice, which took their place)", ("none", "auto")
)
NO_FUNCTION_CALL = Neutral("calls of functions in messages (send tool_calls, which took their place)")
NO_VERBOSITY = Neutral("levels of verbosity", ("medium",))
NO_AUDIO = Neutral("sounds")
NO_MODALITIES = Neutral("answers in other forms than text", (["text"],))
NO_PREDICTION = Neutral("predicted outputs")
NO_SEARCH = Neutral("web searches")
NO_MODERATION = Neutral("moderations")
NO_REFUSAL = Neutral("refusals apart from the content")
NO_ANNOTATIONS = Neutral("annotations", ([],))
NO_SUFFIX = Neutral("suffixes", ("",))
NO_IMAGES = Neutral("images")
NO_DOCUMENT_LIMITS = Neutral("limits on the tokens of a document (truncate: true cuts at the model's own)")
NO_VECTORS = Neutral("vectors beside the scores", (False,))
NO_PRIORITY = Neutral("priorities", (0,))
NO_CHUNKS = Neutral("chunks of documents")
NO_RANK_FIELDS = Neutral("other fields to rank by than text", (["text"],))
NO_LEFT_CUTS = Neutral("cuts at the beginning of a text", ("right", "Right"))
