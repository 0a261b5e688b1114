"""A model in two formats is one model, which runs on the engine that is faster here or on the one that a load names."""

from dataclasses import asdict

import httpx2
import pytest

import lmx_lab
from lmx_lab.engine import speeds
from lmx_lab.errors import LabError
from tests.support.gguf import EXACT, store_copy
from tests.support.labs import serving

pytestmark = pytest.mark.slow
NAME = "smollm2-135m"
REASON = "it is usually the faster engine on a CPU"


@pytest.fixture
def lab(tmp_path, tiny, tiny_gguf, monkeypatch):
    """Run a server with ``tiny`` instead of the starter, in both formats."""
    monkeypatch.setattr(speeds, "gpu_of_mlx", lambda: None)
    (tmp_path / "models" / f"{NAME}-gguf").mkdir(parents=True)
    (tmp_path / "models" / NAME).symlink_to(tiny.path)
    (tmp_path / "models" / f"{NAME}-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    with serving(tmp_path, None, downloads=False) as lab:
        yield lab


def complete(lab, model, **fields):
    body = {"model": model, "prompt": "one", "max_tokens": 2, **fields}
    return httpx2.post(f"{lab.url}/v1/completions", json=body)


def listed(lab):
    """Return the only model of each list."""
    (record,) = httpx2.get(f"{lab.url}/admin/models").json()["models"]
    (card,) = httpx2.get(f"{lab.url}/v1/models").json()["data"]
    assert (card["id"], card["format"], card["formats"]) == (NAME, record["format"], record["formats"])
    return record, card


def test_a_model_in_two_formats_is_listed_once_and_runs_on_the_faster_or_the_required_engine(lab):
    record, _ = listed(lab)
    assert (record["format"], record["formats"], record["loaded"]) == ("gguf", ["gguf", "mlx"], False)
    report = lab.load(NAME)
    assert f", on llama.cpp ({REASON}); 8 requests at once" in repr(report)
    assert f"engine: llama.cpp ({REASON})" in repr(lab)
    assert f"on llama.cpp ({REASON})" in lab.panel("models").snapshot_html()
    record, card = listed(lab)
    assert (record["loaded"], record["engine"], record["engine_reason"]) == (True, "llama.cpp", REASON)
    # The former id means the file, for requests and loads.
    assert httpx2.get(f"{lab.url}/v1/models/{NAME}-gguf").json() == card
    for name in (NAME, f"{NAME}-gguf"):
        assert complete(lab, name).json()["model"] == NAME
        assert lab.load(name).load_s == 0
    assert complete(lab, NAME, echo=True, logprobs=1).status_code == 200

    with lmx_lab.attach(lab.url) as attached:
        assert ", on mlx (as requested); " in repr(attached.load(NAME, engine="mlx"))
    assert complete(lab, NAME, echo=True, logprobs=1).status_code == 200
    record, _ = listed(lab)
    assert (record["format"], record["formats"], record["engine"]) == ("mlx", ["gguf", "mlx"], "mlx")
    # A loaded model stays on its engine, unless another one is named.
    assert (lab.load(NAME).engine, lab.load(NAME).load_s) == ("mlx", 0)
    assert complete(lab, f"{NAME}-gguf").status_code == 503
    assert lab.load(f"{NAME}-gguf").engine == "llama.cpp"
    with pytest.raises(LabError, match=r"there is no model 'other'"):
        lab.load("other", engine="mlx")


def test_a_quantized_copy_is_named_by_the_load_the_list_and_the_answers(lab, tmp_path):
    original = tmp_path / "models" / f"{NAME}-gguf" / "tiny.gguf"
    copy = store_copy(tmp_path, original, EXACT)
    assert f"{REASON}; {EXACT}" in repr(lab.load(NAME))
    record, _ = listed(lab)
    assert (record["path"], record["loaded"]) == (str(copy), True)
    assert record["quantized_copies"] == [record["quantized_copy"]] == [asdict(EXACT)]
    assert "-q8_0-copy" in complete(lab, NAME).json()["system_fingerprint"]
    lab.load(f"{NAME}-gguf")
    record, _ = listed(lab)
    assert (record["path"], record["quantized_copy"]) == (str(original), None)
    assert record["quantized_copies"] == [asdict(EXACT)]
    assert "copy" not in complete(lab, NAME).json()["system_fingerprint"]
