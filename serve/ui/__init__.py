"""The page at /: chat, coloured by who guessed what, and a race against plain decoding."""
