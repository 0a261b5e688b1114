"""Test that errors name the fields of a request as the client has sent them."""

import pytest

from lmx_lab.errors import ContextLengthError, EngineError, InvalidRequestError
from lmx_lab.server import messages, ollama
from lmx_lab.server.convert import call_arguments
from lmx_lab.server.responses import convert
from lmx_lab.values.outputs import ToolCallDelta


@pytest.mark.parametrize(
    ("names", "param", "message", "expected"),
    [
        (
            convert.NAMES,
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: has 9 characters",
            ("text.format.schema", "text.format.schema: has 9 characters"),
        ),
        (
            convert.NAMES,
            "ignore_eos",
            "ignore_eos cannot be combined with response_format or enforced tool calls",
            ("ignore_eos", "ignore_eos cannot be combined with text.format or enforced tool calls"),
        ),
        (
            convert.NAMES,
            "messages",
            "the chat template refuses these messages: (given: 'max_tokens')",
            ("input", "the chat template refuses these messages: (given: 'max_tokens')"),
        ),
        (
            convert.NAMES,
            "max_tokens",
            "max_tokens is 9, not my_max_tokens",
            ("max_output_tokens", "max_output_tokens is 9, not my_max_tokens"),
        ),
        (convert.NAMES, "tools.12.function.parameters", "x", ("tools.12.parameters", "x")),
        (messages.NAMES, "tools.0.function.parameters", "x", ("tools.0.input_schema", "x")),
        (
            messages.NAMES,
            "stop.1",
            "stop.1: is too long; stop it",
            ("stop_sequences.1", "stop_sequences.1: is too long; stop it"),
        ),
        (ollama.NAMES, "seed", "seed: is too large", ("options.seed", "options.seed: is too large")),
        (ollama.NAMES, None, "max_tokens: 0", (None, "options.num_predict: 0")),
    ],
)
def test_fields_have_the_names_of_the_format(names, param, message, expected):
    with pytest.raises(ContextLengthError) as raised, names.in_errors():
        raise ContextLengthError(message, param=param)
    assert (raised.value.param, raised.value.message) == expected
    assert str(raised.value) == expected[1]


def test_other_errors_are_not_changed():
    with pytest.raises(EngineError, match="max_tokens"), convert.NAMES.in_errors():
        raise EngineError("max_tokens")
    with convert.NAMES.in_errors():
        assert InvalidRequestError("max_tokens").message == "max_tokens"


def test_a_number_of_a_call_that_is_too_large_for_a_float_is_a_text_in_json():
    call = ToolCallDelta(index=0, id="call_1", name="add", arguments='{"x": [1e999, -1e999, 5]}')
    assert call_arguments(call) == {"x": ["Infinity", "-Infinity", 5]}
