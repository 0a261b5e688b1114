"""LangChain's own integration tests of a chat model, for ``make clients``.

They run in the environment of the clients, against the server at the address in the environment variable ``LAB``. Tests
of images, audio and PDF files are skipped, because the server reads only text.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestLab(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # LangChain requests the usage of streams by default only from OpenAI.
        lab = {"base_url": os.environ["LAB"], "api_key": "anything", "stream_usage": True}
        return {"model": "default", "temperature": 0, "max_tokens": 300, "max_retries": 0, **lab}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "echo"
