"""Define the vector that is added to the residual stream of one request, also as a field of requests."""

from __future__ import annotations

import array
import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.bodies import Body, Limits, whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VECTOR_LIMIT = 65_536
"""Maximum number of components of a vector; no model has a wider residual stream."""
STEER_LIMIT = 16
"""Maximum number of vectors of a request."""
LARGEST = 3.4e38
"""Maximum of a component times the scale: the range of float32."""


class _Components:
    """Tells pydantic that the components of a vector are given as base64 or as a list."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic import Field
        from pydantic_core import core_schema

        component = Annotated[float, Field(ge=-3e38, le=3e38, allow_inf_nan=False)]
        given = (
            Annotated[str, Field(min_length=1, max_length=-(-VECTOR_LIMIT * 4 // 3) * 4)],
            Annotated[list[component], Field(min_length=1, max_length=VECTOR_LIMIT, fail_fast=True)],
        )
        return core_schema.no_info_after_validator_function(
            lambda vector: vector if isinstance(vector, str) else encode_components(array.array("f", vector)),
            core_schema.union_schema([handler.generate_schema(each) for each in given]),
        )


@dataclass(frozen=True, kw_only=True)
class SteeringVector(Body):
    """A vector that is added to the output of a layer, at each token of the prompt and of the answer."""

    layer: Annotated[int, Limits(whole, ge=0, le=10_000)]
    """Index of the layer, starting at 0."""
    vector: Annotated[str, _Components]
    """Base64 of little-endian float32; requests may also send a list of numbers. The number of components is the
    model's hidden size."""
    scale: Annotated[float, Limits(ge=-1e6, le=1e6, allow_inf_nan=False)] = 1.0
    """Number by which the vector is multiplied."""
    weights: Annotated[str, Limits(pattern="^([0-9a-f]{64})?$")] | None = None
    """SHA-256 of the files of the model for which the vector was made. Other models refuse the vector."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        schema = super().__get_pydantic_core_schema__(source, handler)
        return core_schema.no_info_after_validator_function(cls._checked, schema)

    def _checked(self) -> Self:
        try:
            read_components(self.vector, self.scale)
        except InvalidRequestError as exc:
            raise ValueError(exc.message) from None
        return self


def recorded_steering(request: Mapping[str, Any]) -> tuple[SteeringVector, ...]:
    """Return the vectors of a recorded request, whose fields are JSON values."""
    return tuple(SteeringVector(**each) for each in request.get("steer", ()))


def encode_components(components: array.array[float]) -> str:
    """Return an array of the type ``f`` as base64 of little-endian float32."""
    return base64.b64encode(components.tobytes()).decode()


def read_components(vector: str, scale: float) -> NDArray[np.float32]:
    """Return the components of a vector. Reading a vector of the maximum size takes less than a millisecond.

    Raises:
        InvalidRequestError: the text is not base64 of finite float32 numbers, or a scaled component is not finite.
    """
    import numpy as np  # Imported here, because programs that do not use arrays also import this module.

    try:
        data = base64.b64decode(vector, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(
            f"the vector {vector[:20]!r} is not base64 ({exc}); send base64 of little-endian float32, or a list of "
            "numbers",
            param="steer",
        ) from None
    if not data or len(data) % 4:
        raise InvalidRequestError(
            f"the vector has {len(data)} bytes; send four bytes for each component, as little-endian float32",
            param="steer",
        )
    components = np.frombuffer(data, dtype="<f4").astype(np.float32)
    is_finite = np.isfinite(components)
    if not is_finite.all():
        at = int(is_finite.argmin())
        raise InvalidRequestError(
            f"component {at} of the vector is {components[at]}; all components must be finite numbers", param="steer"
        )
    if abs(scale) * (largest := float(np.abs(components).max())) > LARGEST:
        raise InvalidRequestError(
            f"scale is {scale:g} and the largest component of the vector {largest:g}; their product must be a finite "
            "float32 number",
            param="steer",
        )
    return components
