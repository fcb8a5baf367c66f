"""Lookup in a device loop: the step of drafters whose guesses follow from the text alone, and its
twin on the host."""
