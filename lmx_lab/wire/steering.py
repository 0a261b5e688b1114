"""Define the request field that adds vectors to the residual stream of a request."""

from __future__ import annotations

import array
from typing import Annotated, Self

from pydantic import FailFast, Field, StringConstraints, model_validator
from typing_extensions import TypeAliasType

from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.steering import STEER_LIMIT, VECTOR_LIMIT, SteeringVector, encode_components, read_components
from lmx_lab.wire.base import WHOLE, RequestModel

ENCODED_LIMIT = -(-VECTOR_LIMIT * 4 // 3) * 4
"""Maximum length of a vector in base64."""
Component = Annotated[float, Field(ge=-3e38, le=3e38, allow_inf_nan=False)]
# Named types, because members of a union must be hashable, and FailFast is not.
Components = TypeAliasType(
    "Components", Annotated[list[Component], FailFast(), Field(min_length=1, max_length=VECTOR_LIMIT)]
)


class Steering(RequestModel):
    """A vector that is added to the output of a layer, at each token of the prompt and of the answer."""

    layer: Annotated[int, Field(ge=0, le=10_000), WHOLE]
    """Index of the layer, starting at 0."""
    vector: Annotated[str, StringConstraints(min_length=1, max_length=ENCODED_LIMIT)] | Components
    """Base64 of little-endian float32, or a list of numbers. The number of components is the model's hidden size."""
    scale: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] = 1.0
    """Number by which the vector is multiplied."""
    weights: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the files of the model for which the vector was made. Other models refuse the vector."""

    @model_validator(mode="after")
    def _check_vector(self) -> Self:
        try:
            read_components(self.encoded, self.scale)
        except InvalidRequestError as exc:
            raise ValueError(exc.message) from None
        return self

    @property
    def encoded(self) -> str:
        """The vector as base64."""
        return self.vector if isinstance(self.vector, str) else encode_components(array.array("f", self.vector))

    @property
    def value(self) -> SteeringVector:
        """The vector in the form that the engine uses."""
        return SteeringVector(layer=self.layer, vector=self.encoded, scale=self.scale, weights=self.weights or "")


Steerings = TypeAliasType("Steerings", Annotated[list[Steering], FailFast(), Field(max_length=STEER_LIMIT)])
