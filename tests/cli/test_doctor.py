"""``lmx-lab doctor``: its lines, its document and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import run_command


def test_the_doctor_finds_this_machine_healthy(tiny_home: Path) -> None:
    result = run_command(tiny_home, "doctor", "--json")
    assert (result.status, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["broken"] == 0
    assert {*document["findings"][0]} == {"topic", "verdict", "found", "means", "remedy"}
    topics = {finding["topic"] for finding in document["findings"]}
    assert {"python", "kernel", "mlx", "device", "memory", "blas", "disk", "models", "hub", "port", "labs"} <= topics
