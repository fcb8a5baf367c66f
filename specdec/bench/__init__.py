"""How fast: step times against the bandwidth, cycles, time to first token, speed end to end."""
