"""Test snapshots of a lab."""

from __future__ import annotations

from tests.notebook.snapshots import sample, snapshot


def test_a_snapshot_has_server_model_measurements_machine_and_versions() -> None:
    taken = snapshot("tiny", now=sample(1, memory_active_gb=1.5, queued_requests=3))
    for text in (repr(taken), taken._repr_html_().replace("&#x27;", "'")):
        for words in ("running, on the kernel's loop", "127.0.0.1:8400", "tiny", "3 waiting", "1.50 GB", "cores"):
            assert words in text
        assert all(f"{name} " in text for name in ("lmx-lab", "mlx", "mlx-lm", "python"))
