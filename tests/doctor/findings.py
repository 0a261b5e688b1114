"""Pick findings and compare them."""

from __future__ import annotations

from collections.abc import Iterable

from lmx_lab.doctor import Finding, Verdict


def finding_about(topic: str, findings: Iterable[Finding]) -> Finding:
    """Return the only finding with this topic."""
    (finding,) = [finding for finding in findings if finding.topic == topic]
    return finding


def summary(finding: Finding) -> tuple[Verdict, bool, bool]:
    """Return the verdict, whether the finding explains the consequence, and whether it has a remedy."""
    return finding.verdict, bool(finding.means), bool(finding.remedy)


EXPLAINED_NOTE = ("note", True, True)
EXPLAINED_FAULT = ("bad", True, True)
