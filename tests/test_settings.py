"""Tests of the settings: precedence, types, ranges and secrets."""

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from tests.support.asking import each_value


def test_arguments_take_precedence_over_the_environment_and_the_environment_over_defaults():
    environ = {"LMX_LAB_PORT": "9000", "LMX_LAB_SLOTS": "3"}
    settings = Settings.read(environ, port=9001)
    assert (settings.port, settings.slots, settings.host) == (9001, 3, "127.0.0.1")


def test_variables_are_converted_to_the_types_of_the_settings():
    values = {
        "home": ("~/lab", Path.home() / "lab"),
        "model_folders": (os.pathsep.join(["/a", "/b"]), (Path("/a"), Path("/b"))),
        "downloads": ("false", False),
        "drain_s": ("1.5", 1.5),
        "api_key": ("k", "k"),
        "cors_origins": ("http://a,http://b", ("http://a", "http://b")),
        "memory_limit_bytes": ("1000", 1000),
        "prefix_cache_bytes": ("0", 0),
        "swap": ("1", True),
        "idle_unload_s": ("300", 300.0),
        "daemon_port": ("9401", 9401),
        "upstream": ("http://127.0.0.1:11434", "http://127.0.0.1:11434"),
    }
    settings = Settings.read({f"LMX_LAB_{name.upper()}": text for name, (text, _) in values.items()})
    assert {name: getattr(settings, name) for name in values} == {name: value for name, (_, value) in values.items()}
    assert settings.swap is True
    assert settings.daemon_folder == Path.home() / "lab" / "daemon"


VARIABLES = [
    *each_value(LMX_LAB_PORT=["eighty"], LMX_LAB_DOWNLOADS=["maybe"], LMX_LAB_DAEMON_PORT=["high"]),
    *each_value(LMX_LAB_PREFIX_CACHE_BYTES=["1 GB"]),
]
VALUES = [
    *each_value(port=["eighty", 70000], slots=[0, 2.9], host=[""], daemon_host=[" "], daemon_port=[-1], swap=["maybe"]),
    *each_value(colour=["blue"], log_level=["loud"], drain_s=[-1, float("nan")], idle_unload_s=[0, "soon"]),
    *each_value(prefix_cache_bytes=[-1], announce_name=["kitchen"]),
]


@pytest.mark.parametrize(
    ("environ", "overrides"), [*((given, {}) for given, _ in VARIABLES), *(({}, given) for given, _ in VALUES)]
)
def test_the_error_about_an_invalid_value_names_the_setting(environ, overrides):
    name = next(iter([*environ, *overrides]))
    with pytest.raises(InvalidRequestError, match=name):
        Settings.read(environ, **overrides)


def test_the_error_about_a_number_of_resident_models_names_the_value_the_limits_and_auto():
    with pytest.raises(InvalidRequestError, match=r"^resident is 0; it must be from 1 to 64, or auto$"):
        Settings.read({"LMX_LAB_RESIDENT": "0"})


def test_numbers_of_numpy_are_values_of_settings():
    settings = Settings.read({}, slots=np.int64(2), drain_s=np.float32(0.5))
    assert (settings.slots, type(settings.slots), settings.drain_s) == (2, int, 0.5)
    for overrides in ({"slots": True}, {"slots": np.True_}, {"drain_s": True}, {"slots": np.float64(2)}):
        with pytest.raises(InvalidRequestError, match=next(iter(overrides))):
            Settings.read({}, **overrides)


def test_a_name_for_announcements_needs_one_only_if_it_is_an_argument():
    environ = {"LMX_LAB_ANNOUNCE_NAME": "kitchen"}
    assert Settings.read(environ).announce_name == "kitchen"
    assert Settings.read({"LMX_LAB_ANNOUNCE": "1"}, announce_name="hall").announce_name == "hall"


def test_an_empty_variable_counts_as_not_set():
    assert Settings.read({"LMX_LAB_HOST": "", "LMX_LAB_HOME": "", "LMX_LAB_PORT": ""}) == Settings()


def test_settings_are_frozen_and_their_repr_has_no_keys():
    settings = Settings(api_key="s3cret", upstream_api_key="hidden")
    assert "s3cret" not in repr(settings)
    assert "hidden" not in repr(settings)
    with pytest.raises(FrozenInstanceError):
        settings.port = 1
