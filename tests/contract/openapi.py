"""Compare the responses of a running server with its OpenAPI document."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import schemathesis

EXAMPLES = int(os.environ.get("LMX_LAB_EXAMPLES", "8"))
"""Number of generated requests and chains of requests for each operation, in addition to those that follow from the
document (limits, required fields, examples). Set ``LMX_LAB_EXAMPLES`` to generate more."""
SEED = 1
WAIT_S = 270.0 * max(1, EXAMPLES // 8)


def code_of(body):
    """Return the code in the body of an error, also in that of Ollama's API."""
    error = body["error"]
    code = error["code"] if isinstance(error, dict) else body["code"]
    return code


class OpenApiContract:
    """The OpenAPI document of a running server, and requests whose responses are compared with it.

    Args:
        url: URL of the document.
        key: The API key for every request; a server without a key accepts any.
    """

    def __init__(self, url, *, key="any"):
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"}
        # The checks for each operation.
        self._config = Path(__file__).with_name("daemon.toml" if "/v3/" in url else "server.toml")
        self.schema = schemathesis.openapi.from_url(
            url, headers=self.headers, config=schemathesis.Config.from_path(self._config)
        )

    def generate(self, *options, examples=EXAMPLES):
        """Run schemathesis with a fixed seed and return its output.

        Raises:
            AssertionError: a response differs from the document; the message contains the request.
        """
        program = "from schemathesis.cli import schemathesis; schemathesis()"
        header = [f"--header={name}: {value}" for name, value in self.headers.items()]
        given = ["--no-color", "--config-file", str(self._config), "run", self.url, *header]
        drawn = ["--max-examples", str(examples), "--seed", str(SEED), "--continue-on-failure"]
        # It writes files to the working directory.
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

    def request(self, method, path, *, at=None, query=None, body=None, headers=None):
        """Send one request and check that the response matches the document.

        Args:
            at: The path parameters.
            headers: Headers that replace the key.

        Raises:
            AssertionError: the response differs from the document.
        """
        parts = {"query": dict(query or {}), "path_parameters": dict(at or {})}
        if body is not None:
            parts |= {"body": body, "media_type": "application/json"}
        case = self.schema[path][method].Case(**parts)
        return case.call_and_validate(headers=self.headers if headers is None else dict(headers))

    def operations(self):
        """Yield the method, the path and the definition of all operations."""
        for path, methods in self.schema.raw_schema["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation


CONTEXT = 64
"""Context length in tokens, so that all answers are short."""
