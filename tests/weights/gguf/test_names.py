"""Tests of the information in the names of GGUF files."""

import pytest

from lmx_lab.weights.gguf.names import (
    default_label,
    find_label,
    group_files,
    is_companion,
    label_models,
    parts_of,
    quantization_of,
)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("llama-2-7b.Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-4B-IQ4_XS.gguf", "IQ4_XS"),
        ("Qwen3-4B-BF16.gguf", "BF16"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "F16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Qwen3-4B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("bitnet-TQ1_0.gguf", "TQ1_0"),
        ("model-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("Model-Q6_K-imat.gguf", "Q6_K"),
        ("gemma-3-4b-it-qat-q4_0.gguf", "Q4_0"),
        ("Q8_0.gguf", "Q8_0"),
        ("Q3_K_S/DeepSeek-R1-00001-of-00009.gguf", "Q3_K_S"),
        ("BF16/Qwen3-30B-A3B-BF16-00002-of-00002.gguf", "BF16"),
        ("Qwen3-4B.GGUF", None),
        ("Qwen2-Q4Team.gguf", None),
        ("model.gguf", None),
        ("", None),
    ],
)
def test_the_quantization_is_read_from_the_name(name, quantization):
    assert quantization_of(name) == quantization


def test_the_name_of_one_part_gives_the_names_of_all_parts():
    parts = ("a/m-00001-of-00003.gguf", "a/m-00002-of-00003.gguf", "a/m-00003-of-00003.gguf")
    assert {parts_of(part) for part in parts} == {parts}


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf", "m-00001-of-99999.gguf"]
)
def test_files_with_other_names_are_not_split(name):
    assert parts_of(name) == (name,)


@pytest.mark.parametrize(
    ("name", "companion"),
    [
        ("mmproj-F16.gguf", True),
        ("gemma-3-4b-it-mmproj-f16.gguf", True),
        ("imatrix.gguf", True),
        ("Qwen3-4B.imatrix.gguf", True),
        ("Qwen3-4B-imatrix-Q4_K_M.gguf", False),
        ("mmproj/Qwen3-4B-Q4_K_M.gguf", False),
    ],
)
def test_files_that_accompany_a_model_are_not_models(name, companion):
    assert is_companion(name) == companion
    assert len(group_files([name, "README.md"])) == (not companion)


def test_models_are_labeled_by_quantization_or_by_name_if_two_have_the_same():
    names = [
        "7b-Q4_K_M.gguf",
        "13b-q4_k_m.gguf",
        "7b-Q8_0-00001-of-00002.gguf",
        "7b-Q8_0-00002-of-00002.gguf",
        "x.gguf",
    ]
    models = label_models(group_files(names))
    assert set(models) == {"7b-Q4_K_M", "13b-q4_k_m", "Q8_0", "x"}
    assert models["Q8_0"].names == tuple(names[2:4])


def test_a_label_is_a_quantization_or_a_name_in_any_case():
    models = label_models(group_files(["Q4_K_M/M-Q4_K_M.gguf", "M-UD-Q2_K_XL.gguf"]))
    assert {find_label(models, choice) for choice in ("q4_k_m", "m-q4_k_m.gguf", "Q4_K_M/M-Q4_K_M")} == {"Q4_K_M"}
    assert find_label(models, "ud-q2_k_xl") == "UD-Q2_K_XL"
    assert find_label(models, "Q4") is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf"], "Q4_K_M"),
        (["m-Q8_0.gguf", "m-Q4_0.gguf", "m-Q5_K_M.gguf"], "Q4_0"),
        (["m-Q8_0.gguf", "m-F16.gguf"], "Q8_0"),
        (["m-F32.gguf", "m-BF16.gguf"], "BF16"),
        (["7b-Q4_K_M.gguf", "70b-Q4_K_M.gguf", "7b-Q8_0.gguf"], "7b-Q4_K_M"),
        (["model.gguf"], "model"),
    ],
)
def test_the_default_is_the_preferred_quantization_or_else_the_smallest(names, expected):
    sizes = {name: (4 if "F32" in name else 2) * (10 if "70b" in name else 1) for name in names}
    assert default_label(label_models(group_files(names)), sizes) == expected
