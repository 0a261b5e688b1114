"""Vectors of the real all-MiniLM-L6-v2 equal those that PyTorch computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import embed, load

REFERENCE: Mapping[str, Any] = json.loads(Path(__file__).with_name("minilm_reference.json").read_bytes())
TEXTS = [item["text"] for item in REFERENCE["items"]]


@pytest.fixture(scope="module")
def model(minilm):
    return load(minilm)


def test_vectors_equal_the_reference(model):
    vectors = embed(model, *TEXTS)
    expected = np.array([item["vector"] for item in REFERENCE["items"]], np.float32)
    assert vectors.dtype == np.float32
    assert (np.einsum("ij,ij->i", vectors, expected) >= 0.9999).all()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_properties_are_read_from_the_files(model):
    assert (model.dimensions, model.context_length, model.method) == (384, 256, "cosine")
    assert 90e6 < model.memory_bytes < 95e6


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(model):
    together = embed(model, *TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        alone = embed(model, text)[0]
        assert alone @ vector > 0.999999
        np.testing.assert_allclose(alone, vector, atol=1e-5)


def test_similar_texts_have_similar_vectors(model):
    dog, puppy, law = embed(model, "a dog barks", "a puppy is barking", "the court dismissed the appeal")
    assert dog @ puppy > dog @ law + 0.4
