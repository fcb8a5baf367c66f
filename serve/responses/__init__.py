"""OpenAI's Responses API without stored state, as Codex uses it."""
