"""The console script, and `python -m specdec`: so little that an interrupt finds it ready."""

import os
import signal
import sys

from specdec.core.first_process import end_by_default


def main() -> None:
    """What Ctrl-C interrupts may be an import of seconds: that too ends without a traceback."""
    if os.getpid() == 1:  # a container is stopped while it loads, too
        end_by_default(signal.SIGTERM)
    try:
        from specdec.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
