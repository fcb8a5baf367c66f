"""EAGLE-3: one small decoder layer that reads the target's own states and guesses what follows."""
