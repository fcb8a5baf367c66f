"""Anthropic's Messages: what Claude Code and Anthropic's SDKs speak."""
