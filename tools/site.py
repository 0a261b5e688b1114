"""Build the documentation as a site: ``python tools/site.py FOLDER``.

The pages of ``docs`` are plain Markdown. This program adds an index, the notebooks, and reference pages from docstrings
and OpenAPI documents, and builds everything with Sphinx. A broken link, a missing anchor and a page that is in no
section are errors. The site needs neither a server nor a network. If ``make gallery`` has run the notebooks, their
pages link to the outputs.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

import lmx_lab
import lmx_lab.client

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
GALLERY = ROOT / "build" / "gallery"
SECTIONS: Mapping[str, Sequence[str]] = {
    "Tutorials": ("install", "first-hour", "notebooks/index"),
    "How-to guides": (
        *("models", "notebook", "chat-page", "server", "clients", "daemon", "batch", "evaluate", "instrument"),
        *("benchmarks", "cluster", "troubleshooting", "contributing"),
    ),
    "Reference": (
        *(
            "reference/lab",
            "reference/python",
            "reference/client",
            "reference/server-routes",
            "reference/daemon-routes",
            "routes",
        ),
        *("command-line", "configuration", "glossary", "limits", "trace-families", "benchmark-results"),
        *("dependencies", "changelog"),
    ),
    "Explanation": ("decisions", "engines", "echo", "scope", "security"),
}
PROVISIONAL = frozenset({"Steer", "plan", "Remark", "ClientTimes", "Include"})
"""Public names that may change in any version, as ``docs/scope.md`` defines it. All others are stable."""
PAGE_BYTES = 500_000
CHROMIUM = Path("/usr/bin/chromium")
CHECKED = (
    *("index.html", "server.html", "install.html", "engines.html", "notebooks/00_quickstart.html", "search.html"),
    *("reference/lab.html", "reference/python.html", "reference/client.html", "reference/daemon-routes.html"),
)
"""One page of each kind, on which accessibility is checked."""
ACCESSIBLE = (
    (r'class="caption" role="heading"', r'class="caption" role="heading" aria-level="2"'),
    (r'<aside class="sidebar-drawer"', r'<aside class="sidebar-drawer" aria-label="All pages"'),
    (r'<aside class="toc-drawer', r'<aside aria-label="On this page" class="toc-drawer'),
    # What scrolls must be reached with the keyboard.
    (r"<pre>", r'<pre tabindex="0">'),
    (r'<div class="table-wrapper', r'<div tabindex="0" class="table-wrapper'),
    # The parameters of a signature are a list of definitions without terms.
    (r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>", r'<ul class="signature" style="list-style: none; margin: 0">\n\1</ul>'),
    (r"(?m)^<dd>(<em class=\"sig-param\".*)</dd>$", r"<li>\1</li>"),
    (r'<noscript>\s*<div class="admonition error">', r"<h1>Search</h1>\g<0>"),
)
"""Patterns in the pages of Furo and Sphinx, and what replaces them."""
EVERYWHERE = {"401": "no valid key", "403": "a foreign origin", "421": "a foreign host", "500": "an internal error"}
CONFIGURATION = """
import lmx_lab
import lmx_lab.client
# Imported here, because autodoc would import them with typing.TYPE_CHECKING set, which fails for models of pydantic.
for package in (lmx_lab, lmx_lab.client):
    for name in package.__all__:
        getattr(package, name)

project = "LMX Lab"
author = "LMX Lab contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "LMX Lab"
html_show_copyright = html_show_sphinx = html_copy_source = False
html_extra_path = EXTRA
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
python_maximum_signature_line_length = 88
suppress_warnings = ["misc.highlighting_failure"]
"""


def main(target: Path) -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    for page in SOURCE.glob("*.md"):
        page.write_text(_for_site(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in ("SECURITY", "CHANGELOG"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        (SOURCE / f"{name.lower()}.md").write_text(_for_site(text), encoding="utf-8")
    _write_index()
    _write_notebooks()
    (SOURCE / "reference").mkdir()
    # A lab has a page of its own, because its methods have as much text as all other names.
    _write_names("lab", lmx_lab, ["Lab"], "A lab")
    _write_names("python", lmx_lab, [name for name in lmx_lab.__all__ if name != "Lab"], "The package lmx_lab")
    _write_names("client", lmx_lab.client, lmx_lab.client.__all__, "The package lmx_lab.client")
    _write_routes()
    extra = [str(GALLERY.parent / "site-extra")] if GALLERY.is_dir() else []
    if extra:
        shutil.copytree(GALLERY, Path(extra[0]) / "gallery", dirs_exist_ok=True)
    (SOURCE / "conf.py").write_text(CONFIGURATION.replace("EXTRA", repr(extra)), encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", str(SOURCE), str(target)]
    status = subprocess.run(command, check=False).returncode
    if not status:
        problems = _finish(target)
        print("\n".join(problems) or f"open {target / 'index.html'}")
        status = int(bool(problems))
    return status


def _finish(target: Path) -> list[str]:
    """Correct what the theme and Sphinx leave inaccessible, and return the pages that are too large or have problems
    that axe-core finds.
    """
    pages = [page for page in sorted(target.rglob("*.html")) if "gallery" not in page.parts]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for pattern, replacement in ACCESSIBLE:
            text = re.sub(pattern, replacement, text)
        page.write_text(text, encoding="utf-8")
    problems = [f"{page} has {page.stat().st_size} bytes" for page in pages if page.stat().st_size > PAGE_BYTES]
    if not CHROMIUM.exists():
        print(f"accessibility is not checked, because there is no {CHROMIUM}")
        return problems
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        for scheme in ("light", "dark"):
            shown = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 844})
            for name in CHECKED:
                shown.goto((target / name).as_uri())
                problems += [
                    f"{name}, {scheme}: {each['help']}: {each['nodes'][0]['target']}"
                    for each in Axe().run(shown).response["violations"]
                ]
                if (width := shown.evaluate("document.documentElement.scrollWidth")) > 390:
                    problems.append(f"{name} is {width} pixels wide on a phone")
    return problems


def _for_site(text: str) -> str:
    """Return a page whose links lead to pages of the site."""
    for pattern, link in (
        (r"\]\((?:\.\./)?SECURITY\.md", "](security.md"),
        (r"\]\((?:\.\./)?CHANGELOG\.md", "](changelog.md"),
        (r"\]\((?:\.\./)?notebooks/(\w+)\.ipynb", r"](notebooks/\1.md"),
        (r"\]\((?:\.\./)?notebooks/?\)", "](notebooks/index.md)"),
        (r"\]\(docs/", "]("),
        (r"\[([^\]]+)\]\((?:\.\./)?(?:binder|LICENSE|benchmarks)/?\)", r"\1"),
        # Without a text, a link shows the title of the page.
        (r"\[(?:docs/)?[\w-]+\.(?:md|ipynb)\]\(", "[]("),
    ):
        text = re.sub(pattern, link, text)
    return text


def _write_index() -> None:
    text = _for_site((ROOT / "README.md").read_text(encoding="utf-8")).partition("\n## Documentation\n")[0]
    trees = (
        f"```{{toctree}}\n:caption: {name}\n:hidden:\n" + "\n".join(pages) + "\n```" for name, pages in SECTIONS.items()
    )
    (SOURCE / "index.md").write_text("\n\n".join((text, *trees)), encoding="utf-8")


def _write_notebooks() -> None:
    folder = SOURCE / "notebooks"
    folder.mkdir()
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    tree = "\n".join(names)
    (folder / "index.md").write_text(
        f"# Notebooks\n\nA course in {len(names)} notebooks. `make lab` opens them in JupyterLab.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n{tree}\n```\n",
        encoding="utf-8",
    )
    for name in names:
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        parts = []
        for cell in cells:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if (GALLERY / f"{name}.html").exists():
            parts.insert(1, f'<a href="../gallery/{name}.html">This notebook with its outputs</a>')
        text = re.sub(r"\]\(\.\./docs/", "](../", "\n\n".join(parts))
        text = re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", text)
        (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def _write_names(page: str, package: Any, names: Sequence[str], title: str) -> None:
    """Write a page of public names of a package: each with its signature, docstring and stability."""
    parts = [f"# {title}", "[Scope](../scope.md#stability) explains the labels, also those of methods of `Lab`."]
    for name in names:
        found = getattr(package, name)
        kind = "autoclass" if inspect.isclass(found) else "autofunction" if callable(found) else "autodata"
        options = (
            "   :members:\n   :inherited-members: BaseModel, BaseException, Exception, Sequence, Mapping, list, dict\n"
            if kind == "autoclass"
            else ""
        )
        label = "Provisional" if name in PROVISIONAL else "Stable"
        parts.append(f"## {name}\n\n*{label}.*\n\n```{{eval-rst}}\n.. {kind}:: {package.__name__}.{name}\n{options}```")
    (SOURCE / "reference" / f"{page}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _write_routes() -> None:
    """Write the pages of both programs, from the documents that they serve."""
    with tempfile.TemporaryDirectory() as home, lmx_lab.launch(home=home, port=0, daemon_port=0) as lab:
        daemon = lab.start_daemon()
        for page, title, url, headers in (
            ("server-routes", "Routes of the server", f"{lab.url}/openapi.json", {}),
            (
                "daemon-routes",
                "Routes of the daemon",
                f"{daemon.url}/v3/openapi.json",
                {"Authorization": f"Bearer {daemon.token}"},
            ),
        ):
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                document = json.load(answer)
            path = url.removeprefix(lab.url).removeprefix(daemon.url)
            common = ", ".join(f"{status} ({meaning})" for status, meaning in EVERYWHERE.items())
            parts = [
                f"# {title}",
                f"`GET {path}` returns the same as JSON. All routes may return {common}.",
                *_routes(document),
            ]
            (SOURCE / "reference" / f"{page}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        daemon.stop()


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a section for each route: its description, parameters, the fields of its body, and its statuses."""
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"## {method.upper()} `{path}`"
            yield route.get("description") or route.get("summary", "")
            fields = [
                (each["name"], each["schema"], each.get("required", False), each.get("description", ""))
                for each in route.get("parameters", ())
            ]
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            fields += _fields(document, body)
            if fields:
                rows = [
                    f"| `{name}` | {_kind(document, schema)} | {'yes' if required else ''} | {_cell(text)} |"
                    for name, schema, required, text in fields
                ]
                yield "| field | type | required | description |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
            rows = [
                f"| {status} | {_cell(it.get('description', ''))} |"
                for status, it in route["responses"].items()
                if status not in EVERYWHERE
            ]
            yield "| status | description |\n| --- | --- |\n" + "\n".join(rows)


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool, str]]:
    found = _resolved(document, schema)
    required = found.get("required", ())
    return [
        (name, each, name in required, each.get("description", ""))
        for name, each in found.get("properties", {}).items()
    ]


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while (target := schema.get("$ref")) is not None:
        schema = document["components"]["schemas"][target.rpartition("/")[2]]
    return schema


def _kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if (target := schema.get("$ref")) is not None:
        found = _resolved(document, schema)
        return target.rpartition("/")[2] if "properties" in found else _kind(document, found)
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_kind(document, each) for each in schema[key]))
    if (kind := schema.get("type")) == "array":
        return f"array of {_kind(document, schema.get('items', {}))}"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([str(kind or "any"), *limits])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).absolute()))
