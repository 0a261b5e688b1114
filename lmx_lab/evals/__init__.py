"""Score the answers of a model: metrics, intervals, comparisons by paired tests, and stored experiments.

``lab.evaluate`` takes the metrics of this package::

    from lmx_lab.evals import Choice
    lab.evaluate(frame, "{question}\\nAnswer:", answer="answer", metric=Choice(["yes", "no"]))
"""

from __future__ import annotations

from lmx_lab.evals.metrics import Choice, Contains, ExactMatch, Judge, Metric, Numeric, Regex

__all__ = ["Choice", "Contains", "ExactMatch", "Judge", "Metric", "Numeric", "Regex"]
