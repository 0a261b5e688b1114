"""Test which modules an import loads. Names are tested, because times would depend on the machine."""

import json
import subprocess
import sys

import pytest

# Each of these takes longer to import than the whole package may (150 ms), or starts threads or processes.
HEAVY = "IPython anywidget anyio fastapi httpx2 huggingface_hub ipywidgets llguidance matplotlib mcp mlx mlx_lm numpy "
HEAVY += "pandas prometheus_client pydantic starlette tokenizers transformers uvicorn xllamacpp"
COMPLETION = "from lmx_lab.cli.completion import complete_model; assert 'minilm-l6' in complete_model('')"
SERVER = "import lmx_lab.cli.server, lmx_lab.notebook.lab, lmx_lab.notebook.local"


def modules_loaded_by(statement):
    """Run a statement in a new process, and return the modules that it loads."""
    output = "print(json.dumps(sorted(set(sys.modules) - before)))"
    code = f"import json, sys; before = set(sys.modules); {statement}; {output}"
    completed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return set(json.loads(completed.stdout))


def test_importing_the_package_loads_only_itself_and_the_standard_library():
    loaded = modules_loaded_by("import lmx_lab")
    assert {name for name in loaded if name.split(".")[0] == "lmx_lab"} == {"lmx_lab"}
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"lmx_lab"}


def test_the_public_names_exist_before_their_modules_are_imported():
    loaded = modules_loaded_by("import lmx_lab; assert {'launch', 'attach', 'Lab'} <= set(dir(lmx_lab))")
    assert "lmx_lab.notebook" not in loaded


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lmx_lab.settings", HEAVY),
        ("import lmx_lab.errors", HEAVY),
        ("import lmx_lab.urls", HEAVY),
        ("import lmx_lab.cli", HEAVY),
        ("import lmx_lab; dir(lmx_lab)", f"{HEAVY} asyncio rich"),
        ("import lmx_lab.cli.app", f"{HEAVY} asyncio ssl"),
        ("import lmx_lab.weights.catalog", "mlx transformers tokenizers huggingface_hub"),
        ("from lmx_lab import LabError, Settings", HEAVY),
        ("from lmx_lab import attach", "fastapi starlette uvicorn mlx pandas ipywidgets"),
        ("import lmx_lab.panels.metrics, lmx_lab.panels.events", "pandas"),
        # A server starts without an HTTP client and the engines.
        (SERVER, "httpx2 wsproto mlx mlx_lm transformers huggingface_hub xllamacpp pandas mcp"),
        # It can load a model before it imports its routes.
        ("import lmx_lab.cli.server, lmx_lab.engine.llama_cpp.engine", "fastapi starlette pydantic uvicorn numpy"),
        (COMPLETION, f"{HEAVY} asyncio filelock"),
    ],
)
def test_an_import_loads_no_package_that_it_does_not_need(statement, absent):
    assert not {name.split(".")[0] for name in modules_loaded_by(statement)}.intersection(absent.split())


def test_usual_options_are_parsed_without_pydantic():
    # The module that the command imports to run the server.
    server = (
        "import asyncio, types; sys.modules['lmx_lab.cli.server'] = types.SimpleNamespace(run_server=lambda settings, "
        "spec, **options: asyncio.sleep(0, print(spec.model, settings.port, file=sys.stderr)))"
    )
    # Standard output is that of the list of modules.
    loaded = modules_loaded_by(
        f"{server}; from lmx_lab.cli import app; output, sys.stdout = sys.stdout, sys.stderr; "
        "app.run(['serve', '--model', 'tiny', '--port', '8123']); sys.stdout = output"
    )
    assert "lmx_lab.cli.serve" in loaded
    assert "pydantic" not in loaded


def test_models_are_completed_without_the_catalog():
    loaded = modules_loaded_by(COMPLETION)
    assert "lmx_lab.weights.locations" in loaded
    assert not loaded & {"lmx_lab.weights.catalog", "lmx_lab.weights.facts"}
