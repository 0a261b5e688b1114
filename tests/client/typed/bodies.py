"""Bodies of requests: their fields take what the format takes, anything in a few of them."""

from lmx_lab.wire.chat import ChatMessage, ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody


def chat_request(text: str) -> ChatRequest:
    return ChatRequest(model="default", messages=[ChatMessage(role="user", content=text)], max_tokens=8)


def embedding_request(*texts: str) -> EmbeddingsBody:
    return EmbeddingsBody(model="default", input=list(texts))


def rerank_request(query: str, *documents: str) -> RerankBody:
    return RerankBody(model="default", query=query, documents=list(documents))
