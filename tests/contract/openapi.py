"""A document, and the running server that has to keep it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.schemas import OpenApiSchema

EXAMPLES = int(os.environ.get("LMX_LAB_EXAMPLES", "8"))
"""That are drawn for each operation, and chains of them, beside those that the document itself leads to: its bounds,
what it requires, its own examples. More for a longer look."""
SEED = 1
WAIT_S = 270.0 * max(1, EXAMPLES // 8)


class Contract:
    """
    Args:
        url: Of the document.
        key: For every request; a server that needs none takes any.
        config: What schemathesis checks where.
    """

    def __init__(self, url: str, *, config: Path, key: str = "any") -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"}
        self._config = config
        self.schema: OpenApiSchema = schemathesis.openapi.from_url(
            url, headers=self.headers, config=schemathesis.Config.from_path(config)
        )

    def draw(self, *options: str, examples: int = EXAMPLES) -> str:
        """Let schemathesis ask all that it thinks of, the same in each run; what it says.

        Raises:
            AssertionError: an answer was not as described; with the request.
        """
        program = "from schemathesis.cli import schemathesis; schemathesis()"
        header = [f"--header={name}: {value}" for name, value in self.headers.items()]
        given = ["--no-color", "--config-file", str(self._config), "run", self.url, *header]
        drawn = ["--max-examples", str(examples), "--seed", str(SEED), "--continue-on-failure"]
        # It leaves notes where it runs.
        with tempfile.TemporaryDirectory() as place:
            done = subprocess.run(
                [sys.executable, "-c", program, *given, *drawn, *options],
                cwd=place,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(
        self,
        method: str,
        path: str,
        *,
        at: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One request; what comes has to be as described.

        Args:
            at: The ids in the path.
            headers: In the place of the key.

        Raises:
            AssertionError: it is not as described.
        """
        parts: dict[str, Any] = {"query": dict(query or {}), "path_parameters": dict(at or {})}
        if body is not None:
            parts |= {"body": body, "media_type": "application/json"}
        case = self.schema[path][method].Case(**parts)
        return case.call_and_validate(headers=self.headers if headers is None else dict(headers))

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Method, path and what the document says of them."""
        for path, methods in self.schema.raw_schema["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation
