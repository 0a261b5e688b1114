"""Where the benchmarks keep what they make. All of it can be deleted."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"
MODELS = BUILD / "models"
LOGS = BUILD / "logs"
