"""Tests that the generated blocking clients are up to date."""

import pytest

from lmx_lab.client.blocking.generate import CLASSES, FOLDER, generate


@pytest.mark.parametrize("target", CLASSES, ids=lambda target: target.name)
def test_a_generated_client_is_up_to_date(target):
    path = FOLDER / f"{target.module}.py"
    assert path.read_text(encoding="utf-8") == generate(target), f"{path.name} is not up to date; run make blocking"
