"""Where the benchmarks keep what they make. All below ``BUILD`` can be deleted."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "BENCHMARKS.md"
"""The last results of everything, which is no thing to delete."""
BUILD = ROOT / "build" / "bench"
MODELS = BUILD / "models"
LOGS = BUILD / "logs"
