"""Define the vector that is added to the residual stream of one request."""

from __future__ import annotations

import array
import base64
import binascii
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.errors import InvalidRequestError

VECTOR_LIMIT = 65_536
"""Maximum number of components of a vector; no model has a wider residual stream."""
STEER_LIMIT = 16
"""Maximum number of vectors of a request."""
LARGEST = 3.4e38
"""Maximum of a component times the scale: the range of float32."""


@dataclass(frozen=True, kw_only=True)
class SteeringVector:
    """A vector that is added, times ``scale``, to the output of a layer at each token of the prompt and the answer."""

    layer: int
    """Index of the layer, starting at 0."""
    vector: str
    """The components as base64 of little-endian float32."""
    scale: float = 1.0
    weights: str = ""
    """SHA-256 of the files of the model for which the vector was made; empty if the hash is not known."""


def recorded_steering(request: Mapping[str, Any]) -> tuple[SteeringVector, ...]:
    """Return the vectors of a recorded request, whose fields are JSON values."""
    return tuple(SteeringVector(**each) for each in request.get("steer", ()))


def encode_components(components: array.array[float]) -> str:
    """Return an array of the type ``f`` as base64 of little-endian float32."""
    if sys.byteorder == "big":
        components = array.array("f", components)
        components.byteswap()
    return base64.b64encode(components.tobytes()).decode()


def read_components(vector: str, scale: float) -> array.array[float]:
    """Return the components of a vector.

    Raises:
        InvalidRequestError: the text is not base64 of finite float32 numbers, or a scaled component is not finite.
    """
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
    components = array.array("f", data)
    if sys.byteorder == "big":
        components.byteswap()
    # The sum in float64 is finite if and only if all components are.
    if not math.isfinite(sum(components)):
        at = next(at for at, value in enumerate(components) if not math.isfinite(value))
        raise InvalidRequestError(
            f"component {at} of the vector is {components[at]}; all components must be finite numbers", param="steer"
        )
    if abs(scale) * max(map(abs, components)) > LARGEST:
        raise InvalidRequestError(
            f"scale is {scale:g} and the largest component of the vector {max(map(abs, components)):g}; their product "
            "must be a finite float32 number",
            param="steer",
        )
    return components
