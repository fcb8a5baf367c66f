"""Lookup in a device loop: the step of drafters that guess from the text alone, and a host drafter
with the same guesses."""
