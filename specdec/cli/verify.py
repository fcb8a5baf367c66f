"""`specdec verify`: judge receipts by replay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from specdec.audit.verdict import exit_code
from specdec.audit.verify import report, verify as verified
from specdec.cli import topics
from specdec.cli.console import console, print_json
from specdec.cli.progress import Bar
from specdec.cli.start import SHOWN
from specdec.core.errors import UserError


def verify(
    *files: Path,
    model: Annotated[str, Parameter(group="Model")] = "mini",
    json: topics.Json = False,
) -> None:
    """Replay claimed answers, and print a verdict on each.

    A receipt comes from `specdec generate --receipt FILE`, from `Answer.receipt()` in Python, or
    from a server's reply to a request with `include_receipt`. Its ids are fed as a prediction, so
    that one read of the weights checks up to K + 1 of them. The model is loaded once, with the
    arithmetic of the first receipt (slots, context, width, dtypes); all are replayed as one batch.

    Verdicts: verified; differs at an id; ends otherwise; text differs; log-probability differs;
    cannot be compared (another model, version or device); refused. Constraints and biases that may
    force a text are shown below. Exit code 0: all are verified. 1: a claim is false. 2: otherwise.

    What a pass proves, and what not: docs/guide/audit.md.

    Parameters
    ----------
    files
        Receipts, one answer in each.
    model
        The model that is claimed: a checkpoint folder, a name on the Hugging Face hub, or mini.
    """
    if not files:
        raise UserError("name a receipt: specdec verify answer.json --model ./gemma-4-E4B-it")
    verdicts = verified(files, model, SHOWN, lambda total: Bar(console, "ids", total))
    for verdict in verdicts:
        print(verdict)
    if json:
        print_json(report(verdicts))
    if code := exit_code(verdicts):
        sys.exit(code)
