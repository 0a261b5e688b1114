"""Fixtures that load tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmx_lab.engine.encoders import LoadedEncoder
from tests.support.models import Load, load, write_tiny_bert, write_tiny_qwen3, write_tiny_qwen3_reranker


@pytest.fixture
def bert(tmp_path: Path) -> Load:
    """A tiny BERT, with the arguments of ``write_tiny_bert``."""
    return lambda *args, **kwargs: load(write_tiny_bert(tmp_path / "tiny-bert", *args, **kwargs))


@pytest.fixture
def qwen3(tmp_path: Path) -> Load:
    return lambda *args, **kwargs: load(write_tiny_qwen3(tmp_path / "tiny-qwen3", *args, **kwargs))


@pytest.fixture
def logit_reranker(tmp_path: Path) -> LoadedEncoder:
    return load(write_tiny_qwen3_reranker(tmp_path / "tiny-reranker"))
