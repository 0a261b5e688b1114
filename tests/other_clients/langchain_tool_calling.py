"""LangChain's own integration tests of a chat model, of which ``make clients`` runs those of tool calling.

They run in the environment of the clients, against the server at the address in the environment variable ``LAB``.
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
        lab = {"base_url": os.environ["LAB"], "api_key": "anything"}
        return {"model": "default", "temperature": 0, "max_tokens": 300, "max_retries": 0, **lab}
