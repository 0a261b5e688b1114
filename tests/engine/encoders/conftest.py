"""Fixtures that load tiny models."""

import pytest

from tests.support.models import load, write_tiny_bert, write_tiny_qwen3, write_tiny_qwen3_reranker


@pytest.fixture
def bert(tmp_path):
    """A tiny BERT, with the arguments of ``write_tiny_bert``."""
    return lambda *args, **kwargs: load(write_tiny_bert(tmp_path / "tiny-bert", *args, **kwargs))


@pytest.fixture
def qwen3(tmp_path):
    return lambda *args, **kwargs: load(write_tiny_qwen3(tmp_path / "tiny-qwen3", *args, **kwargs))


@pytest.fixture
def logit_reranker(tmp_path):
    return load(write_tiny_qwen3_reranker(tmp_path / "tiny-reranker"))
