"""How the embedded models were made. Not a part of the installed package."""
