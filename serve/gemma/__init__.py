"""Gemma 4's own forms: what it generates, taken apart; its tool calls, as grammars."""
