"""`--help` of commands with many options: the `Common` ones on one screen; `--help-all`: all."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seqs
from typing import TYPE_CHECKING, get_args

from cyclopts import App
from cyclopts.argument import Argument
from cyclopts.help.formatters import DefaultFormatter
from rich.text import Text

from specdec.core.config import Common

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"
HELP_FLAGS = "--help", "-h", HELP_ALL


def choose_help(command: App, arguments: Seqs[str]) -> None:
    """Let a command's help show all options if these arguments have `--help-all`, else its common
    ones."""
    short = HELP_ALL not in arguments
    command.help_formatter = _CommonOptions(command) if short else None
    more = f"All options: specdec {command.name[0]} {HELP_ALL}"
    command.help_epilogue = more if short else None


class _CommonOptions(DefaultFormatter):
    """Writes a panel's common options, each with the first sentence of its help."""

    def __init__(self, command: App) -> None:
        super().__init__()
        self._command = command

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        helps = self._common()
        entries = [
            entry.copy(description=Text(helps[entry.display_labels[0]]))
            for entry in panel.entries
            if entry.display_labels[0] in helps
        ]
        super().__call__(console, options, panel.copy(entries=entries))

    def _common(self) -> dict[str, str]:
        """The common options' names, and the first sentences of their helps."""
        arguments = self._command.assemble_argument_collection(parse_docstring=True)
        return {each.names[0]: _sentence(each) for each in arguments if _is_common(each)}


def _is_common(argument: Argument) -> bool:
    return Common in get_args(argument.field_info.annotation)


def _sentence(argument: Argument) -> str:
    """The first one of its help."""
    return re.split(r"(?<=\.)\s", " ".join((argument.parameter.help or "").split()))[0]
