"""The prefix cache: what prefill wrote for a prompt, kept for later prompts that begin alike."""
