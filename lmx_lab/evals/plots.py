"""Plot the calibration of an evaluation. The figure need not be closed, because pyplot is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmx_lab.bench.plots import NotebookFigure

if TYPE_CHECKING:
    import pandas as pd

INCHES = (4.2, 4.2)


def reliability_diagram(bins: pd.DataFrame, *, title: str) -> NotebookFigure:
    """Plot the accuracy of each bin over its confidence. The diagonal is perfect calibration.

    Args:
        bins: The result of ``Evaluation.calibration``.
    """
    figure = NotebookFigure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], linestyle="--", color="0.5", linewidth=1)
    axes.plot(bins["confidence"], bins["accuracy"], marker="o")
    for row in bins.itertuples():
        axes.annotate(
            str(row.n), (row.confidence, row.accuracy), textcoords="offset points", xytext=(4, -10), fontsize=8
        )
    error = bins.attrs["expected_calibration_error"]
    axes.set(xlim=(0, 1), ylim=(-0.03, 1.03), xlabel="probability of the answer", ylabel="share of right answers")
    axes.set_title(f"{title}\nexpected calibration error {error:.3f}", fontsize=9)
    return figure
