"""OpenAI's Responses, without a memory: what Codex speaks."""
