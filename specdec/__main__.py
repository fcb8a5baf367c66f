"""`python -m specdec`, for where the console script is not on the path."""

from specdec.cli import main

main()
