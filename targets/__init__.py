"""Targets: the model that decides every token, one contract for every backend."""
