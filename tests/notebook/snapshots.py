"""Snapshots of a lab that does not run."""

from __future__ import annotations

from lmx_lab.backend import ServerState
from lmx_lab.notebook.report import Snapshot, take_snapshot
from lmx_lab.wire.admin import Compute, ModelRecord, ModelRecords, Sample

STATE = ServerState(state="running", place="the kernel's loop", url="http://127.0.0.1:8400", model="tiny")


def sample(at: float, **values: float) -> Sample:
    zero = dict.fromkeys(set(Sample.model_fields) - {"type", "at"}, 0)
    return Sample(at=at, **{**zero, **values})


def record(name: str) -> ModelRecord:
    places = {"path": "/m", "loaded": True, "vram_gb": 0.27, "format": "mlx", "kind": "chat", "size_gb": 0.26}
    return ModelRecord.model_validate({"id": name, **places, "quantization": None, "context_length": 8192})


def snapshot(*models: str, state: ServerState = STATE, now: Sample | None = None) -> Snapshot:
    compute = Compute(blas="openblas", detail="2 threads", threads=2, gflops=80.0)
    return take_snapshot(state, ModelRecords(models=[record(name) for name in models], compute=compute), now)
