"""Test the arrangement of panels in a grid."""

import pytest

from lmx_lab.panels.layout import full_width

WIDE, NARROW = True, False


@pytest.mark.parametrize(
    ("panels", "spans"),
    [
        ([NARROW] * 4, [False] * 4),
        ([NARROW] * 3, [False, False, True]),
        ([NARROW] * 4 + [WIDE], [False] * 4 + [True]),
        ([NARROW, WIDE, NARROW, NARROW], [True, True, False, False]),
    ],
)
def test_no_cell_beside_a_panel_is_empty(panels, spans):
    assert full_width(panels) == spans
