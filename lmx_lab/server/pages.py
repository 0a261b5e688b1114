"""Two pages for browsers: an overview of the server, and Swagger UI, in which the routes can be tried.

All links are relative, because behind JupyterHub or Binder the server has a path that only the browser knows.
"""

from __future__ import annotations

import base64
import hashlib

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from lmx_lab.http.guard import CONTENT_POLICY
from lmx_lab.http.middleware import VERSION

SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/swagger-ui"
"""Scripts and styles (1.9 MB) that the browser loads from a CDN. They run with the rights of this server's pages, so
their hashes are pinned here."""
STYLE_HASH = "WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I"
SCRIPT_HASH = "gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9"
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>LMX Lab</title>'
FRONT = f"""{HEAD}
<h1>LMX Lab {VERSION}</h1>
<p>This server runs local language models. Programs use it through the chat-completions format; their base URL is the
address of this page followed by <code>v1</code>.
<ul>
<li><a href="docs">docs</a>: try all routes in the browser; <a href="openapi.json">openapi.json</a>: their description
for programs
<li><a href="readyz">readyz</a>: whether a model can answer requests
<li><a href="v1/models">v1/models</a>, <a href="admin/models">admin/models</a>: the models on disk, and which are loaded
<li><a href="metrics">metrics</a>: metrics for Prometheus
</ul>
"""
# The document is passed as a value and not as a URL, so that requests go to the path of this page and not to the root
# of the Hub.
START = """
window.SwaggerUIBundle && fetch(document.getElementById("document").href).then((it) => it.json()).then((spec) => {
  spec.servers = [{ url: new URL(".", location).href }];
  SwaggerUIBundle({ dom_id: "#routes", deepLinking: true, spec });
});
"""
DOCS = f"""{HEAD}
<link rel="stylesheet" href="{SWAGGER}.css" integrity="sha384-{STYLE_HASH}" crossorigin="anonymous">
<div id="routes"><p>This page is rendered by Swagger UI, which the browser loads from the internet. Without it, all
routes are described in <a id="document" href="openapi.json">openapi.json</a>.</div>
<script src="{SWAGGER}-bundle.js" integrity="sha384-{SCRIPT_HASH}" crossorigin="anonymous"></script>
<script>{START}</script>
"""
FRONT_POLICY = f"default-src 'none'; base-uri 'none'; form-action 'none'; {CONTENT_POLICY}"
START_HASH = base64.b64encode(hashlib.sha256(START.encode()).digest()).decode()
# Swagger UI's style sheet contains images as data URLs.
DOCS_POLICY = (
    f"{FRONT_POLICY}; script-src {SWAGGER}-bundle.js 'sha256-{START_HASH}'; style-src {SWAGGER}.css; "
    "img-src data:; connect-src 'self'"
)
"""The content security policy of the page: it may use its two scripts, its style sheet and this server."""


def page_routes() -> APIRouter:
    """Return the router of the pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    # HEAD is for clients that only check whether the page exists. The HTTP server omits the body.
    @router.api_route("/", methods=["GET", "HEAD"])
    async def front() -> HTMLResponse:
        return _page(FRONT, FRONT_POLICY)

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> HTMLResponse:
        return _page(DOCS, DOCS_POLICY)

    return router


def _page(text: str, policy: str) -> HTMLResponse:
    return HTMLResponse(text, headers={"content-security-policy": policy})
