"""One command in several processes, each with its own devices, often on its own host."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from cyclopts import Parameter

from drafters.registry import find
from specdec.cli.console import console
from specdec.cli.failure import say_failure
from specdec.cli.progress import working
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.control_channel import ControlChannel, Meeting, call, invite
from specdec.core.errors import UserError

AUTO = "auto"
GRACE = 10.0
"""Seconds, after a failed collective, for a control connection to report which process is gone."""
PLACES = ("model", "draft_model", "cache")
"""Options with folders, which may have other paths on each host."""


@Parameter(name="*", group="Hosts")
@dataclass(frozen=True)
class HostsConfig:
    coordinator_address: str | None = None
    """HOST:PORT of process 0, the same in every process: jax splits the model over the devices of
    all processes; --tp is their total number. auto: a Cloud TPU pod, Slurm or Open MPI provides
    this and the next two."""
    num_processes: int | None = None
    "How many processes there are. Start the same command in each."
    process_id: int | None = None
    "Which one this is, from 0. Process 0 alone prints, listens and answers."

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for invalid options, before waiting for the other processes."""
        numbers = (self.num_processes, self.process_id)
        if self.coordinator_address is None:
            if numbers != (None, None):
                raise UserError("--num-processes and --process-id need --coordinator-address")
            return
        if model.backend != "jax":
            raise UserError(
                "--coordinator-address needs --backend jax: cuda uses the GPUs of one machine"
            )
        if self.coordinator_address == AUTO:
            if numbers != (None, None):
                raise UserError(
                    "--coordinator-address auto finds --num-processes and --process-id by itself: "
                    "leave them out, or name HOST:PORT"
                )
            return
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(
                f"--coordinator-address must be HOST:PORT or auto, got {self.coordinator_address}"
            )
        if self.num_processes is None or self.process_id is None:
            raise UserError(
                "--coordinator-address HOST:PORT needs --num-processes and --process-id"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise UserError(
                f"--process-id must be 0 to {self.num_processes - 1} (--num-processes "
                f"{self.num_processes}), got {self.process_id}"
            )

    @property
    def found(self) -> bool:
        """Whether address and numbers come from the cluster."""
        return self.coordinator_address == AUTO


@contextmanager
def joined(
    config: HostsConfig, model: ModelConfig, *topics: Any, **options: Any
) -> Iterator[ControlChannel | None]:
    """The connections to the other processes while the command runs, None if it runs alone.

    topics (dataclasses) and options: further settings that must be the same in all processes.
    Processes other than 0 print only failures. If one fails or dies, all end with one line and exit
    code 2, as the others would wait for its devices for ever. Raises UserError.
    """
    config.check(model)
    if config.coordinator_address is None:
        yield None
        return
    for topic in topics:
        _check_choices(topic)
    end = _End()
    lines = _meet(config, end)
    try:
        _check_split(model)
        fields = {k: v for topic in (model, *topics) for k, v in asdict(topic).items()}
        check_same(lines, fields | options)
        if lines.leads:
            yield lines
        else:
            console.quiet = True
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                yield lines
    except BaseException as problem:
        if lines.closed:
            raise
        end.because_of(problem, lines)
    lines.close()
    _leave()


def _check_choices(topic: Any) -> None:
    """Raise UserError for a drafter that decides by its own time measurements whether a drafter
    with weights runs: processes would measure different times, and run different programs."""
    if not isinstance(topic, SpeculationConfig):
        return
    part = find(topic.drafter).part
    if part is not None and (weighted := part(topic)) is not None:
        raise UserError(
            f"--drafter {topic.drafter} with {weighted} decides by the times that each process "
            f"measures, but all must run the same programs: use --drafter {weighted} or "
            "--auto-with none with several processes"
        )


def _meet(config: HostsConfig, end: _End) -> ControlChannel:
    from targets.jax import hosts

    address = None if config.found else config.coordinator_address
    where = "the cluster's coordinator" if address is None else address
    too_late = (
        f"not all processes came to {where} within {hosts.PATIENCE} s: start the command in each"
    )
    with working(console, f"waiting for the other processes at {where}"):
        process, count = hosts.join(
            address, config.num_processes, config.process_id, lambda: end.now(too_late)
        )
        if process == 0:
            host = address.rpartition(":")[0] if address else socket.gethostname()
            return invite(host, count - 1, hosts.share, end.now)
        meeting = Meeting.unpacked(hosts.share(b""))
        try:
            return call(process, meeting, end.now)
        except OSError as problem:
            end.now(f"process 0 cannot be reached at {meeting.host}:{meeting.port}: {problem}")


def _check_split(model: ModelConfig) -> None:
    from targets.jax.hosts import check_split

    check_split(model.tp)


def _leave() -> None:
    from targets.jax.hosts import leave

    leave()


def check_same(lines: ControlChannel, options: dict[str, Any]) -> None:
    """Raise UserError if an option differs from process 0's: processes with different programs
    would wait for each other for ever."""
    own = {name: repr(value) for name, value in options.items() if name not in PLACES}
    if lines.leads:
        lines.send(json.dumps(own).encode())
        return
    first = json.loads(lines.receive())
    for name, value in own.items():
        if value != first.get(name):
            raise UserError(
                f"{name} is {value} in process {lines.process} and {first.get(name)} in process 0: "
                "start the same command in each"
            )


class _End:
    """Ends this process once, with one line, from any thread. An orderly exit would wait for the
    other processes in JAX's barrier."""

    def __init__(self) -> None:
        self._once = threading.Lock()

    def now(self, why: str) -> NoReturn:
        with self._once:
            say_failure(why)
            os._exit(2)

    def because_of(self, problem: BaseException, lines: ControlChannel) -> NoReturn:
        """End because of an exception of the command, and notify the other processes."""
        if isinstance(problem, UserError):
            lines.fail(str(problem))
            self.now(str(problem))
        if isinstance(problem, BrokenPipeError):  # the reader of process 0's output closed it
            lines.fail("its output was closed")
            with self._once:
                os._exit(141)
        if isinstance(problem, KeyboardInterrupt):
            lines.fail("interrupted")
            with self._once:
                os._exit(130)
        if type(problem).__name__ == "JaxRuntimeError":  # failed collective: a process is gone
            threading.Event().wait(GRACE)
        lines.fail(f"{type(problem).__name__}: {problem}")
        with self._once:
            traceback.print_exception(problem)
            sys.stderr.flush()
            os._exit(1)
