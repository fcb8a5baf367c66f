"""Builds a running engine from its configuration: model, drafter, loop, self-check and warm-up.
Used by the command line and `specdec.load`."""
