"""Define what an answer, a tool call, a cost and a model are. Uses the standard library only."""
