"""Turn tokens into text, thoughts and tool calls. Pure code."""
