"""Write a tiny model whose answers do not end; the usual one ends after a few hundred random tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import write_tiny_llama


def write_endless_llama(folder: Path, tokenizer_from: Path, *, seed: int, context: int) -> None:
    """Write a model as ``write_tiny_llama`` does, but without the token that ends a text."""
    write_tiny_llama(folder, tokenizer_from, seed=seed, context=context)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    _change(folder / "config.json", eos_token_id=[vocabulary])
    _change(folder / "tokenizer_config.json", eos_token=None)


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
