"""Folders and files of the benchmarks. Everything below ``BUILD`` can be deleted."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmark-results.md"
"""The last complete results; part of the repository."""
IMAGES = ROOT / "docs" / "images"
"""Folder of the charts that the page shows; part of the repository."""
BUILD = ROOT / "build" / "bench"
MODELS = BUILD / "models"
LOGS = BUILD / "logs"
