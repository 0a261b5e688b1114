"""The generated blocking clients are those of the async ones as they are now."""

from __future__ import annotations

import pytest

from lmx_lab.client.blocking.generate import CLASSES, FOLDER, BlockingClass, generate


@pytest.mark.parametrize("wanted", CLASSES, ids=lambda wanted: wanted.name)
def test_a_generated_client_is_up_to_date(wanted: BlockingClass) -> None:
    path = FOLDER / f"{wanted.module}.py"
    assert path.read_text(encoding="utf-8") == generate(wanted), f"{path.name} is not up to date; run make blocking"
