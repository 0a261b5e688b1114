"""Define ``Steer``: a vector that is added to the residual stream of a request, and the model it was made for."""

from __future__ import annotations

import array
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmx_lab.errors import InvalidRequestError, newer_version
from lmx_lab.results.pages import path_of, write_file
from lmx_lab.values.integers import whole_number
from lmx_lab.values.outputs import Vectors
from lmx_lab.values.steering import LARGEST, VECTOR_LIMIT, encode_components
from lmx_lab.values.tensors import decode_tensors, encode_tensors

FORMAT, VERSION = "lmx-lab steering vector", 1


@dataclass(frozen=True, eq=False, repr=False)
class Steer:
    """A vector that is added, times ``scale``, to the output of a layer at each token of a prompt and its answer.

    The output of a layer is ``blocks.{layer}.hook_resid_post``. ``lab.chat(..., steer=[Steer(...)])`` steers one
    request, but no other request in the same batch. Multiplication, such as ``2 * steer``, multiplies the scale.

    Raises:
        InvalidRequestError: the vector is not a list of finite numbers, or the layer or the scale is not a number.
    """

    layer: int
    """Index of the layer, starting at 0."""
    vector: Vectors
    """One number for each component of the residual stream."""
    scale: float = 1.0
    model: str = field(default="", kw_only=True)
    """Id of the model for which the vector was made."""
    weights: str = field(default="", kw_only=True)
    """SHA-256 of the files of this model; other models refuse the vector. Empty if the hash is not known."""
    source: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The data from which the vector was computed, as JSON values."""

    def __post_init__(self) -> None:
        # Tensors of other libraries may have types that NumPy lacks, such as bfloat16.
        to_list = None if isinstance(self.vector, np.ndarray) else getattr(self.vector, "tolist", None)
        try:
            values = np.asarray(self.vector if to_list is None else to_list())
        except (TypeError, ValueError) as exc:
            raise InvalidRequestError(f"the vector is not a list of numbers: {exc}", param="vector") from None
        if values.ndim != 1 or not len(values):
            raise InvalidRequestError(
                f"the vector has the shape {values.shape}; pass one number for each component of the residual stream",
                param="vector",
            )
        if len(values) > VECTOR_LIMIT:
            raise InvalidRequestError(
                f"the vector has {len(values)} components, and the limit is {VECTOR_LIMIT}", param="vector"
            )
        if values.dtype.kind not in "biuf":
            raise InvalidRequestError(
                f"the components of the vector are {values.dtype}; pass real numbers", param="vector"
            )
        is_finite = np.abs(values.astype(np.float64)) <= LARGEST
        if not is_finite.all():
            at = int(np.argmin(is_finite))
            raise InvalidRequestError(
                f"component {at} of the vector is {values[at]}; it must be a finite float32 number", param="vector"
            )
        vector = np.array(values, dtype=np.float32)
        vector.flags.writeable = False
        layer = whole_number(self.layer, "layer", low=0)
        is_number = isinstance(self.scale, int | float | np.integer | np.floating) and not isinstance(self.scale, bool)
        if not is_number or not abs(self.scale) <= LARGEST:
            raise InvalidRequestError(f"scale is {self.scale!r:.40}; it must be a finite float32 number", param="scale")
        object.__setattr__(self, "vector", vector)
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "scale", float(self.scale))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        # Arrays are writable after unpickling and deep copying.
        self.vector.flags.writeable = False

    @property
    def width(self) -> int:
        """Number of components."""
        return len(self.vector)

    # Otherwise, NumPy would compute the product of a NumPy number and a vector.
    __array_ufunc__ = None

    def __mul__(self, factor: float) -> Steer:
        return replace(self, scale=self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Steer:
        return replace(self, scale=self.scale / divisor)

    def __neg__(self) -> Steer:
        return -1 * self

    def to_json(self) -> dict[str, Any]:
        """Return the item of the request field ``steer``."""
        return {
            "layer": self.layer,
            "vector": encode_components(array.array("f", self.vector.tobytes())),
            "scale": self.scale,
            "weights": self.weights or None,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the vector as a safetensors file, and return its path.

        Raises:
            InvalidRequestError: the file cannot be written, or ``source`` has values that are not JSON.
        """
        try:
            source = json.dumps(dict(self.source))
        except (TypeError, ValueError) as exc:
            raise InvalidRequestError(
                f"source cannot be written as JSON: {exc}; convert its values, for example with float()", param="source"
            ) from None
        metadata = {
            "format": f"{FORMAT} {VERSION}",
            "layer": str(self.layer),
            "scale": repr(self.scale),
            "model": self.model,
            "weights": self.weights,
            "source": source,
        }
        return write_file(path, encode_tensors({"vector": self.vector}, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Steer:
        """Return the vector in a file written by ``save``.

        Raises:
            InvalidRequestError: the file does not exist, or does not contain a steering vector.
        """
        source = path_of(path)
        try:
            # The weights of a model are in the same format, and are too large to read. Metadata has up to 1 MB.
            if (size := source.stat().st_size) > 4 * VECTOR_LIMIT + 2**20:
                raise ValueError(f"it has {size} bytes")
            arrays, metadata = decode_tensors(source.read_bytes())
            if metadata.get("format") != f"{FORMAT} {VERSION}":
                name, _, version = metadata.get("format", "").rpartition(" ")
                if name != FORMAT:
                    raise ValueError("it was not written by Steer.save")
                raise InvalidRequestError(f"{source} {newer_version(version, VERSION)}", param="path")
            return cls(
                int(metadata["layer"]),
                arrays["vector"],
                float(metadata["scale"]),
                model=metadata["model"],
                weights=metadata["weights"],
                source=json.loads(metadata["source"]),
            )
        except OSError as exc:
            raise InvalidRequestError(f"{source} cannot be read: {exc.strerror or exc}", param="path") from exc
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidRequestError(
                f"{source} does not contain a steering vector ({exc}); pass a file written by Steer.save",
                param="path",
            ) from exc

    def __repr__(self) -> str:
        # Comparisons identify settings by this text, so it contains all digits of the scale and a digest of the vector.
        digest = hashlib.sha256(self.vector.tobytes()).hexdigest()[:12]
        made_for = f", of {self.model}" if self.model else ""
        return f"<Steer layer {self.layer}, scale {self.scale!r}, {self.width} components {digest}{made_for}>"


def mean_difference(layer: int, positive: Sequence[Vectors], negative: Sequence[Vectors], *, normalize: bool) -> Steer:
    """Return the difference between the mean activations of two groups as a steering vector.

    Args:
        normalize: Whether to scale the vector to length 1.

    Raises:
        InvalidRequestError: both means are equal.
    """
    one, other = (np.array(group, dtype=np.float64).mean(axis=0) for group in (positive, negative))
    difference = one - other
    length = float(np.linalg.norm(difference))
    residual_norm = float(np.mean([np.linalg.norm(row) for row in (*positive, *negative)]))
    # Rounding alone causes a difference of up to this length.
    if length <= 1e-5 * residual_norm:
        raise InvalidRequestError(
            "both groups have the same mean activations, apart from rounding; pass other texts, or another position",
            param="positive",
        )
    return Steer(
        layer,
        (difference / length if normalize else difference).astype(np.float32),
        source={
            "positive": len(positive),
            "negative": len(negative),
            "length": length,
            "residual_norm": residual_norm,
        },
    )
