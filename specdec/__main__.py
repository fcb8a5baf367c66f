"""The console script, and `python -m specdec`: so little that an interrupt finds it ready."""

import sys


def main() -> None:
    """What Ctrl-C interrupts may be an import of seconds: that too ends without a traceback."""
    try:
        from specdec.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
