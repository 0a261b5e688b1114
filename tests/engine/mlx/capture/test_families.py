"""The page about families lists the hooks of each family."""

import pytest

from tests.engine.mlx.capture.families import PAGE, table, written


@pytest.mark.long
def test_the_table_of_families_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, table()), "run: .venv/bin/python -m tests.engine.mlx.capture.families"
