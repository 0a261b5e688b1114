"""Tests that error messages for callers on other machines contain no paths of this machine."""

from pathlib import Path

import pytest

from lmx_lab.server.app import without_paths


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("tiny at /home/me/models/tiny cannot be loaded", "tiny at tiny cannot be loaded"),
        ("'/srv/x/tiny/model.safetensors': damaged", "'model.safetensors': damaged"),
        ("(/srv/x/tiny/), see", "((a folder)), see"),
        ("/data/my models/tiny/config.json is missing", "tiny/config.json is missing"),
        ("load it: POST /admin/models/load, GET /v1/models", "load it: POST /admin/models/load, GET /v1/models"),
        ("see /docs, https://host.example/a/b or org/name/x", "see /docs, https://host.example/a/b or org/name/x"),
    ],
)
def test_messages_lose_paths_and_keep_routes_and_addresses(text, public):
    assert without_paths(text, [Path("/data"), Path("/data/my models")]) == public
