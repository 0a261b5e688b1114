"""The route of chats, and how long tests wait for its answers."""

CHAT = "/v1/chat/completions"
WAIT_S = 60
