"""The files of a model are found on disk, or downloaded where that is allowed. The engine of a model in several formats
is the fastest one here, unless the caller requires another one.
"""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine import engines, speeds
from lmx_lab.engine.engines import choose_engine
from lmx_lab.engine.find import ModelFinder, choose_format, from_disk
from lmx_lab.engine.speeds import PreferredEngine, gpu_of_mlx, preferred_engine, replaced_cuda_package
from lmx_lab.errors import DownloadError, ModelNotFoundError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, LoadSpec, ModelEvent
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.starters import STARTERS
from lmx_lab.weights.store import Progress
from tests.support.engines import SPEEDS
from tests.support.gguf import EXACT, LOSSY
from tests.support.models import TINY_ENTRY

pytestmark = pytest.mark.anyio
NAME = "smollm2-135m"
MLX = replace(TINY_ENTRY, id=NAME, path=Path("/models") / NAME)
GGUF = replace(MLX, path=Path("/models/file.gguf"), format="gguf", aliases=(f"{NAME}-gguf",))
EXACT_COPY = replace(GGUF, path=Path("/quantized/exact.gguf"), aliases=(), copy=EXACT)
LOSSY_COPY = replace(GGUF, path=Path("/quantized/lossy.gguf"), aliases=(f"{NAME}:Q4_0",), copy=LOSSY)
ON_CPU = PreferredEngine(name="llama.cpp", reason="it is usually the faster engine on a CPU")
ON_GPU = PreferredEngine(name="mlx", reason="it uses the GPU (Metal)")


MISSING = ModelNotFoundError("there is no model 'org/name'", param="model")
INCOMPLETE = UnusableModelError("org/name lacks a file", param="model")


class FakeCatalog(Catalog):
    """A catalog with some formats of a model, which records what is fetched.

    Args:
        missing: The error if there is no entry.
        failure: The error of a download.
    """

    def __init__(self, *entries, missing=MISSING, failure=None):
        super().__init__(Settings(home=Path("/nowhere")))
        self.entries, self.missing, self.failure = entries, missing, failure
        self.fetched = []

    def find_formats(self, name, *, local=True, all_formats=False):
        found = [each for each in self.entries if all_formats or name == each.id or each.has_alias(name)]
        if not found:
            raise self.missing
        return found

    def fetch(self, name, report=None, *, format=None):
        self.fetched.append((name, format))
        report(Progress(stage="download", done_bytes=1, total_bytes=2))
        if self.failure is not None:
            raise self.failure
        return MLX if format == "mlx" else GGUF


async def find(catalog, name=NAME, engine="auto", *, local=True, downloads=True, report=lambda _: None):
    finder = ModelFinder(Settings(home=Path("/nowhere"), downloads=downloads), catalog, report=report)
    return await finder.find(LoadSpec(model=name, engine=engine), local=local)


@pytest.mark.parametrize("missing", [MISSING, INCOMPLETE])
async def test_a_missing_or_incomplete_model_is_downloaded(missing):
    progress = []
    assert await find(FakeCatalog(missing=missing), "org/name", report=progress.append) is GGUF
    assert progress == [ModelEvent(model="org/name", stage="download", done_bytes=1, total_bytes=2)]


@pytest.mark.parametrize(("downloads", "local"), [(False, True), (True, False)])
async def test_downloads_need_the_setting_and_a_caller_on_this_machine(downloads, local):
    catalog = FakeCatalog()
    with pytest.raises(ModelNotFoundError):
        await find(catalog, "org/name", downloads=downloads, local=local)
    assert catalog.fetched == []


async def test_a_damaged_model_that_cannot_be_downloaded_is_unusable():
    with pytest.raises(UnusableModelError, match="lacks a file"):
        await find(FakeCatalog(missing=INCOMPLETE), "/models/tiny")


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        (MISSING, ModelNotFoundError, "org/name is not on disk: the hub does not answer"),
        (INCOMPLETE, UnusableModelError, "org/name lacks a file; the hub does not answer"),
    ],
)
async def test_a_failed_download_has_the_error_of_the_missing_model(missing, error, message):
    with pytest.raises(error, match=message):
        await find(FakeCatalog(missing=missing, failure=DownloadError("the hub does not answer")), "org/name")


async def test_a_disk_that_does_not_answer_is_an_error():
    end = threading.Event()
    with pytest.raises(NotLoadedError, match=r"tiny was not loaded: the folders .* not been read within 0\.05 s"):
        await from_disk(end.wait, "tiny", 0.05)
    end.set()


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setattr(speeds, "gpu_of_mlx", lambda: None)


def test_on_a_gpu_mlx_is_preferred_whatever_was_measured(monkeypatch):
    monkeypatch.setattr(speeds, "gpu_of_mlx", lambda: "Metal")
    assert preferred_engine(SPEEDS) == ON_GPU


def test_on_a_cpu_the_measured_engine_is_preferred_and_llama_cpp_without_a_clear_measurement():
    assert preferred_engine(None) == preferred_engine(replace(SPEEDS, busy_percent=90)) == ON_CPU
    assert preferred_engine(SPEEDS).reason == "measured MLX 24 tok/s, llama.cpp 110 tok/s for smollm2-135m"
    opposite = replace(SPEEDS, tokens_per_second={"mlx": 99.0, "llama.cpp": 50.0})
    assert preferred_engine(opposite).name == "mlx"


def test_without_llama_cpp_mlx_is_preferred_and_the_reason_names_the_extra(monkeypatch):
    monkeypatch.setattr(engines, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    preferred = preferred_engine(SPEEDS)
    assert preferred.name == "mlx"
    assert preferred.reason.endswith("not installed: pip install 'lmx-lab[gguf]'")
    # A model that llama.cpp alone could run is found nevertheless; the engine then refuses it.
    assert choose_format([MLX, GGUF], LoadSpec(model=NAME), ON_CPU, []) == MLX


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has packages for NVIDIA GPUs on Linux only")
def test_mlx_uses_an_nvidia_gpu_unless_mlx_cpu_has_replaced_its_library(tmp_path, monkeypatch):
    library, listed = tmp_path / "mlx" / "lib" / "libmlx.so", tmp_path / "mlx_cuda_13-0.32.4.dist-info"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"for a GPU")
    listed.mkdir()
    (listed / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n")
    (listed / "RECORD").write_text("mlx/lib/libmlx.so,sha256=abc,9\nmlx/lib/libmlx.so.txt,,\n")
    monkeypatch.setattr(speeds, "CUDA_DEVICES", (str(library),))
    assert (gpu_of_mlx(), replaced_cuda_package()) == (None, None)
    monkeypatch.syspath_prepend(tmp_path)
    assert (gpu_of_mlx(), replaced_cuda_package()) == ("CUDA", None)
    library.write_bytes(b"for a CPU only")
    assert (gpu_of_mlx(), replaced_cuda_package()) == (None, "mlx-cuda-13==0.32.4")
    monkeypatch.setattr(speeds, "CUDA_DEVICES", ())
    assert gpu_of_mlx() is None


@pytest.mark.parametrize(
    ("entries", "engine", "preferred", "loaded", "expected", "reason"),
    [
        ([MLX, GGUF], "auto", ON_CPU, [], GGUF, "it is usually the faster engine on a CPU"),
        ([MLX, GGUF], "auto", ON_GPU, [], MLX, "it uses the GPU (Metal)"),
        ([MLX], "auto", ON_CPU, [], MLX, "its only format on disk is MLX"),
        ([GGUF], "auto", ON_GPU, [], GGUF, "its only format on disk is GGUF"),
        ([MLX, GGUF], "auto", ON_CPU, [replace(MLX, engine_reason="as requested")], MLX, "as requested"),
        ([MLX, GGUF], "mlx", ON_CPU, [GGUF], MLX, "as requested"),
        ([GGUF], "mlx", ON_CPU, [], None, None),
    ],
)
def test_the_format_is_that_of_the_required_the_loaded_or_the_preferred_engine(
    *, entries, engine, preferred, loaded, expected, reason
):
    found = choose_format(entries, LoadSpec(model=NAME, engine=engine), preferred, loaded)
    assert found == expected
    assert (found and found.engine_reason) == reason


@pytest.mark.parametrize("loaded", [[], [MLX]])
@pytest.mark.parametrize(("option", "value"), [("deterministic", True), ("kv_cache_dtype", "q8_0")])
def test_a_load_with_an_option_of_llama_cpp_takes_the_gguf_file_if_there_is_one(monkeypatch, loaded, option, value):
    monkeypatch.setattr(speeds, "gpu_of_mlx", lambda: "Metal")
    spec = replace(LoadSpec(model=NAME), **{option: value})
    preferred = preferred_engine(None, spec)
    found = choose_format([MLX, GGUF], spec, preferred, loaded)
    assert found == GGUF
    assert (found and found.engine_reason) == f"only this engine loads models with {option}"
    assert choose_format([MLX], spec, preferred, loaded) == MLX
    kept = choose_format([MLX, GGUF], spec, preferred, [replace(GGUF, engine_reason="as requested")])
    assert (kept and kept.engine_reason) == "as requested"


@pytest.mark.parametrize(
    ("name", "entries", "engine", "expected"),
    [
        (NAME, [MLX, GGUF, EXACT_COPY, LOSSY_COPY], "auto", EXACT_COPY),
        (NAME, [GGUF, EXACT_COPY], "auto", EXACT_COPY),
        (NAME, [MLX, GGUF, LOSSY_COPY], "auto", GGUF),
        (NAME, [MLX, GGUF, EXACT_COPY], "llama.cpp", EXACT_COPY),
        (f"{NAME}-gguf", [GGUF, MLX, EXACT_COPY], "llama.cpp", GGUF),
        (f"{NAME}:Q4_0", [LOSSY_COPY], "auto", LOSSY_COPY),
    ],
)
def test_a_quantized_copy_is_loaded_by_default_only_if_it_is_faster_and_nearly_exact(name, entries, engine, expected):
    found = choose_format(entries, LoadSpec(model=name, engine=engine), ON_CPU, [])
    assert found == expected
    assert ("mean KL" in found.engine_reason) is (expected.copy is not None)


@pytest.mark.parametrize(
    ("figures", "automatic"),
    [({}, True), ({"mean_kl": 0.011}, False), ({"prefill_speed": 1.1}, False), ({"decode_speed": 0.7}, False)],
)
def test_a_copy_with_a_loss_or_without_a_gain_is_not_used_by_default(figures, automatic):
    copy = replace(EXACT, **figures)
    assert copy.automatic is automatic
    assert ("loaded by default" in copy.describe(NAME)) is automatic


async def test_a_starter_is_fetched_in_the_format_that_its_engine_needs(monkeypatch):
    assert STARTERS[NAME].converts
    for name, engine, fetched in (
        (NAME, "auto", (NAME, "gguf")),
        (NAME, "mlx", (NAME, "mlx")),
        (f"{NAME}-gguf", "auto", (f"{NAME}-gguf", None)),
    ):
        catalog = FakeCatalog()
        await find(catalog, name, engine)
        assert catalog.fetched == [fetched]
    monkeypatch.setattr(engines, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    for on_disk in ([], [GGUF]):
        catalog = FakeCatalog(*on_disk)
        assert await find(catalog) == MLX
        assert catalog.fetched == [(NAME, "mlx")]


async def test_the_other_format_is_made_only_if_its_engine_is_required():
    catalog = FakeCatalog(GGUF)
    assert await find(catalog) == GGUF
    assert await find(catalog, engine="llama.cpp") == GGUF
    assert catalog.fetched == []
    # The conversion needs no download, but a caller on this machine.
    made = await find(catalog, engine="mlx", downloads=False)
    assert (made, made.engine_reason, catalog.fetched) == (MLX, "as requested", [(NAME, "mlx")])
    with pytest.raises(UnusableModelError, match=r"in the format GGUF only, .*lmx-lab pull smollm2-135m --mlx"):
        await find(catalog, engine="mlx", local=False)
    with pytest.raises(UnusableModelError, match=r"in the format MLX only, .*lmx-lab pull smollm2-135m-gguf"):
        await find(FakeCatalog(MLX), engine="llama.cpp", downloads=False)


async def test_an_engine_that_cannot_run_the_model_or_is_not_installed_is_refused(monkeypatch):
    file = replace(GGUF, id="org/name:Q4_K_M", aliases=())
    with pytest.raises(UnusableModelError, match=r"convert the file for MLX: lmx-lab pull org/name:Q4_K_M --mlx"):
        await find(FakeCatalog(file), file.id, "mlx")
    monkeypatch.setattr(engines, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    catalog = FakeCatalog()
    with pytest.raises(UnusableModelError, match=r"not installed: pip install 'lmx-lab\[gguf\]'"):
        await find(catalog, engine="llama.cpp")
    assert catalog.fetched == []


# The engine of a format


QUANTIZED = replace(TINY_ENTRY, id="org/name:Q4_K_M", path=Path("/models/name-q4_k_m.gguf"), format="gguf")


@pytest.mark.parametrize(
    ("entry", "own", "other", "next_step"),
    [
        (QUANTIZED, "llama.cpp", "mlx", "convert .*: lmx-lab pull org/name:Q4_K_M --mlx$"),
        (TINY_ENTRY, "mlx", "llama.cpp", "load"),
        (ECHO, "echo", "mlx", "load another"),
    ],
)
def test_only_the_engine_of_the_format_is_accepted_by_name(entry, own, other, next_step):
    for accepted in ("auto", own):
        choose_engine(entry, LoadSpec(model=entry.id, engine=accepted))
    message = f"{entry.id} has the format {entry.format}, which runs on {own} and not on {other}; leave out engine, or "
    with pytest.raises(UnusableModelError, match=message + next_step) as refused:
        choose_engine(entry, LoadSpec(model=entry.id, engine=other))
    assert (refused.value.code, refused.value.param) == ("invalid-request", "engine")
