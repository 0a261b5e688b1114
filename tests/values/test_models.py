"""How to load a model."""

from dataclasses import fields, replace

import pytest

from lmx_lab.errors import ArgumentError
from lmx_lab.values.models import LoadOptions, LoadReport, LoadSpec
from lmx_lab.wire.admin import LoadRequest


def test_only_options_that_were_changed_are_sent():
    assert LoadSpec.with_options("tiny", {"engine": "mlx"}).options == {"engine": "mlx"}
    assert LoadSpec.with_options("tiny", {"engine": "auto"}) == LoadSpec(model="tiny")
    assert LoadSpec(model="tiny", pin="chat", dtype="float16").options == {}


@pytest.mark.parametrize("name", ["pin", "adapters"])
def test_an_unknown_option_of_a_load_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=rf"'{name}'.* are model, engine"):
        LoadSpec.with_options("tiny", {name: "chat"})


def test_an_option_that_is_misspelled_is_named():
    with pytest.raises(ArgumentError, match=r"'engin'; did you mean 'engine'\?"):
        LoadSpec.with_options("tiny", {"engin": "mlx"})


def test_the_report_of_a_load_is_a_sentence():
    report = LoadReport(model="tiny", load_s=1.25, memory_bytes=270_000_000)
    assert repr(report) == "tiny loaded in 1.2 s, 0.27 GB of memory"
    planned = replace(report, slots=8, context_length=5120)
    assert repr(planned) == f"{report!r}; 8 requests at once, of up to 5,120 tokens each"
    assert repr(replace(report, slots=1)) == f"{report!r}; 1 request at once"


def test_requests_have_the_options_of_a_load():
    options = set(LoadOptions.__annotations__)
    assert options <= {field.name for field in fields(LoadSpec)}
    assert set(LoadRequest.model_fields) == {"model", *options}
