"""The receipt of a model on this machine: what it is, whether it is exact, how its drafters guess,
and how fast it answers."""
