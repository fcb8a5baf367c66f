"""The page at /: a chat with tokens coloured by the source of each guess, and a race against plain
decoding."""
