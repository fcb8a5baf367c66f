"""Google's draft model of each Gemma 4, which attends to the target's own keys and values."""
