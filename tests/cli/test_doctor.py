"""Tests of ``lmx-lab doctor``: its JSON document and its exit status."""

import json

from tests.support.commands import run_command


def test_nothing_is_broken_on_this_machine(tiny_home):
    result = run_command(tiny_home, "doctor", "--json")
    assert (result.status, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["broken"] == 0
    assert {*document["findings"][0]} == {"topic", "verdict", "found", "means", "remedy"}
    topics = {finding["topic"] for finding in document["findings"]}
    assert {"python", "kernel", "mlx", "device", "memory", "blas", "disk", "models", "hub", "port", "labs"} <= topics
