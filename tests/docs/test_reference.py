"""Test that the tables of settings and of error codes agree with the code, in both directions."""

import dataclasses
import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperOption

from lmx_lab.cli.app import app
from lmx_lab.http.errors import status_of
from lmx_lab.settings import CHOICES, PREFIX, RANGES, Settings
from lmx_lab.values.models import LoadOptions
from tests.support.asking import error_classes
from tests.support.docs import DOCS, ROOT, inline_code, table_rows

CONFIGURATION = DOCS / "configuration.md"
SETTINGS = {row["setting"].strip("`"): row for row in table_rows(CONFIGURATION, "setting")}
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
OTHER_OPTIONS = {"serve": {"model", "quiet", *LoadOptions.__annotations__}, "daemon": {"mcp_config", "yes"}}
"""Options that are not settings, by command."""
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")


def test_every_setting_has_a_row_and_every_row_is_a_setting():
    assert list(SETTINGS) == list(dict.fromkeys(SETTINGS))
    assert set(SETTINGS) == set(FIELDS)
    assert len(list(table_rows(CONFIGURATION, "setting"))) == len(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_has_its_variable_and_default(name):
    row = SETTINGS[name]
    assert row["variable"] == f"`{PREFIX}{name.upper()}`"
    assert row["default"] == documented(getattr(Settings(), name))
    assert row["meaning"]


def documented(value):
    """Return a default as the table writes it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, Path):
        return f"`~/{value.relative_to(Path.home())}`"
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_has_its_unit_and_range(name):
    values = SETTINGS[name]["values"]
    assert values.startswith("seconds") == (name.endswith("_s") and not name.endswith("_per_s"))
    assert values.startswith("bytes") == name.endswith("_bytes")
    if name in CHOICES:
        assert values == ", ".join(f"`{choice}`" for choice in CHOICES[name])
    elif name in RANGES:
        bounds = re.search(r"(\S+) to (\S+)$", values)
        assert (number(bounds[1]), number(bounds[2])) == RANGES[name]
    else:
        assert "to" not in values.split()
        assert (values == "yes or no") == isinstance(getattr(Settings(), name), bool)


def number(text):
    base, power = re.fullmatch(r"([\d.]+?)([⁰¹²³⁴⁵⁶⁷⁸⁹]*)", text).groups()
    return float(base) ** int(power.translate(SUPERSCRIPTS) or 1)


GROUP = typer.main.get_command(app)


class ReadError(Exception):
    """Raised instead of reading the settings."""


def options(command):
    for parameter in GROUP.commands[command].params:
        if isinstance(parameter, TyperOption) and parameter.name not in (*OTHER_OPTIONS[command], "help"):
            yield parameter


FLAGS = [(command, option.opts[0], option.is_flag) for command in OTHER_OPTIONS for option in options(command)]


@pytest.mark.parametrize(("command", "flag", "is_switch"), FLAGS, ids=str)
def test_a_flag_sets_the_setting_of_its_row(command, flag, is_switch, monkeypatch):
    seen = {}

    def read(**overrides):
        seen.update({name: value for name, value in overrides.items() if value is not None})
        raise ReadError

    monkeypatch.setattr(Settings, "read", read)
    with pytest.raises(ReadError):
        GROUP.main([command, flag] if is_switch else [command, flag, "7"], standalone_mode=False)
    assert [name for name, row in SETTINGS.items() if f"`{command} {flag}`" in row["flag"].split(", ")] == list(seen)


def test_the_table_has_every_flag_and_no_other():
    in_table = {flag for row in SETTINGS.values() for flag in row["flag"].split(", ") if flag != "none"}
    assert in_table == {f"`{command} {flag}`" for command, flag, _ in FLAGS}


def test_every_variable_that_the_package_reads_is_documented():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lmx_lab").rglob("*.py"))
    read = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", sources))
    assert read <= {text.partition("=")[0] for text in inline_code(CONFIGURATION)}


# Error codes

CODES = list(table_rows(DOCS / "troubleshooting.md", "code"))


def test_every_error_code_has_one_row_and_every_row_is_an_error_code():
    documented_codes = [row["code"].strip("`") for row in CODES]
    assert len(documented_codes) == len(set(documented_codes))
    assert set(documented_codes) == {error.code for error in error_classes()}


@pytest.mark.parametrize("row", CODES, ids=lambda row: row["code"].strip("`"))
def test_an_error_code_has_its_statuses_and_a_remedy(row):
    assert row["what it means"]
    assert row["what to do"]
    if "status" in row:
        code = row["code"].strip("`")
        statuses = {str(status_of(error(""))) for error in error_classes() if error.code == code}
        assert statuses <= set(re.findall(r"\d+", row["status"]))
