"""Make a quantized copy of a model, which llama.cpp computes faster, in a separate process (``quantize_worker``)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmx_lab.engine.llama_cpp.process import llama_environ, require_installed
from lmx_lab.engine.llama_cpp.quantize_worker import BLOCK, BYTES, type_after
from lmx_lab.engine.memory import default_threads, limit_bytes
from lmx_lab.engine.speeds import gpu_of_mlx
from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry, QuantizedCopy, QuantizedType
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.facts import read_facts, read_gguf
from lmx_lab.weights.fingerprint import require_unchanged, with_marks
from lmx_lab.weights.gguf.convert import converted_id, worker_environ
from lmx_lab.weights.gguf.header import GgufHeader
from lmx_lab.weights.gguf.names import parts_of
from lmx_lab.weights.locations import copy_locations, remove_stale_copies, write_copy
from lmx_lab.weights.store import (
    Progress,
    ProgressCallback,
    full_disk_error,
    ignore_progress,
    lock_model,
    publish,
    require_disk,
    workspace,
)

EXTRA_BYTES = 2**29
"""Memory for contexts and logits while both models are measured."""


def quantize(
    settings: Settings, name: str, type_name: QuantizedType, progress: ProgressCallback | None = None
) -> ModelEntry:
    """Return the quantized copy of a model. It is made and measured once; the model is downloaded if necessary.

    Args:
        name: As in ``Catalog.fetch``.
        type_name: Type of the weights in the copy.
        progress: As in ``Catalog.fetch``.

    Raises:
        UnusableModelError: the model is not a GGUF file, cannot be copied, or was changed meanwhile; llama.cpp is not
            installed; or this machine computes on a GPU.
        ModelNotFoundError, DownloadError: as ``Catalog.fetch``.
        StorageFullError: the disk is too small, or cannot be written to.
        OutOfMemoryError: the model and its copy do not fit in memory together.
    """
    report = progress or ignore_progress
    catalog = Catalog(settings)
    fetched = catalog.fetch(name, report, format="gguf")
    entries = [fetched, *catalog.find_formats(name, all_formats=True)]
    original = next((entry for entry in entries if entry.format == "gguf" and entry.copy is None), None)
    if original is None:
        raise UnusableModelError(
            f"{fetched.id} has no GGUF file, of which a copy could be made; fetch one: lmx-lab pull org/name:Q4_K_M"
        )
    require_installed(original.path)
    if (gpu := gpu_of_mlx()) is not None:
        raise UnusableModelError(
            f"quantized copies are for CPUs, and this machine computes on its GPU ({gpu}); use the original"
        )
    header = read_gguf(original.path)
    refuse_unsupported(original, header, type_name)
    folder = settings.quantized_folder
    remove_stale_copies(folder)
    report(Progress(stage="verify", done_bytes=0, total_bytes=original.size_bytes))
    key = f"{converted_id(original.path)}-{type_name.lower()}"
    with lock_model(folder, key):
        if not any(location.id == key for location in copy_locations(folder)):
            copied_bytes = copy_bytes(header, type_name)
            require_disk(folder, copied_bytes, settings.disk_reserve_bytes, key)
            needed_bytes = original.size_bytes + copied_bytes + EXTRA_BYTES
            if needed_bytes > (limit := limit_bytes(settings.memory_limit_bytes)):
                raise OutOfMemoryError(
                    f"{original.id} and its copy need {needed_bytes / 1e9:.1f} GB of memory to be compared, and "
                    f"{limit / 1e9:.1f} GB are allowed; use the original"
                )
            original = with_marks(original)
            with workspace(folder, key) as temp:
                made = temp / "copy"
                made.mkdir()
                target = made / f"{original.path.stem}-{type_name}.gguf"
                parameters = {
                    "source": str(original.path.absolute()),
                    "target": str(target),
                    "type": type_name,
                    "threads": settings.threads or default_threads(os.environ),
                    "parent": os.getpid(),
                }
                copy = _run_worker(parameters, original, temp, report)
                require_unchanged(original)
                read_facts(target)
                write_copy(made, key, original.path, copy)
                publish(made, folder / key, temp)
    path = next(location.path for location in copy_locations(folder) if location.id == key)
    return next(entry for entry in catalog.find_formats(key) if entry.path == path)


def refuse_unsupported(entry: ModelEntry, header: GgufHeader, type_name: QuantizedType) -> None:
    """Check by the header that a copy in this type can be made and measured.

    Raises:
        UnusableModelError: the model is split into parts, does not generate text, or would not change.
    """
    if len(parts_of(header.path.name)) > 1:
        raise UnusableModelError(f"{entry.id} is split into parts, and only single files can be copied; join its parts")
    if entry.kind != "chat":
        raise UnusableModelError(
            f"{entry.id} is not a chat model, and the loss of a copy is measured by the next token; use it as it is"
        )
    if all(type_after(tensor, type_name) == tensor.type for tensor in header.tensors):
        types = ", ".join(sorted({tensor.type for tensor in header.tensors if len(tensor.shape) > 1}))
        raise UnusableModelError(
            f"{entry.id} has no matrices that could become {type_name}: they are {types}, or their rows are not "
            f"multiples of {BLOCK}; use it as it is"
        )


def copy_bytes(header: GgufHeader, type_name: QuantizedType) -> int:
    """Return an upper bound of the size of the copy."""
    weights = sum(
        math.ceil(math.prod(tensor.shape) * BYTES[type_after(tensor, type_name)]) for tensor in header.tensors
    )
    return weights + header.data_offset + 64 * len(header.tensors)


def _run_worker(
    parameters: Mapping[str, Any], original: ModelEntry, folder: Path, report: ProgressCallback
) -> QuantizedCopy:
    answer: dict[str, Any] = {}
    command = [sys.executable, "-P", "-m", "lmx_lab.engine.llama_cpp.quantize_worker"]
    environ = worker_environ() | llama_environ(os.environ)
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(parameters))
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "stage" in answer:
                    report(Progress(**answer))
        except (ValueError, BrokenPipeError):
            # The process crashed in the middle of a line, or before it read its parameters.
            answer = {}
        finally:
            process.kill()
        status = process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if "copy" in answer:
        return QuantizedCopy(**answer["copy"])
    if answer.get("full"):
        raise full_disk_error(f"{original.id} was copied", folder)
    reason = answer.get("error") or f"the process ended with status {status}: {' '.join(last)[:300] or 'no message'}"
    raise UnusableModelError(f"no quantized copy of {original.id} was made: {reason}")
