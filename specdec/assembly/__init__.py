"""From what was asked for to a running engine: model, drafter, loop, proof and warm-up. The command
line and the door (`specdec.load`) are made of it."""
