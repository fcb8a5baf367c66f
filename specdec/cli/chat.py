"""`specdec chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from drafters.registry import resolved
from specdec.assembly.model import Model
from specdec.cli import topics
from specdec.cli.console import console, say_model
from specdec.cli.start import check_max_tokens, loaded_model
from specdec.core.config import Common, ModelConfig, PrefixConfig, SamplingConfig
from specdec.core.errors import UserError
from specdec.llm import LLM
from specdec.llm_types import Chunk, SamplingParams

HELP = """\
/drafter NAME   draft with it from now on; without NAME, which one does, and all names
/k N            most draft tokens per cycle; without N, how many now
/seed N         another answer: the same seed gives the same one
/retry          answer the last message again
/undo           forget the last message and its answer
/new            begin anew
/system TEXT    how the model is to answer; begins anew
/help           this list
/exit           leave, as /quit and Ctrl-D do; Ctrl-C ends an answer"""
ENDS = "/exit", "/quit"
"""What ends a conversation."""


@dataclass
class Talk:
    """A conversation, and how its next answer is made."""

    llm: LLM
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    system: str = ""
    drafter: str | None = None
    k: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def drafters(self) -> list[str]:
        """What may be named."""
        return sorted({*self.llm.drafters, "none"})

    def ask(self, text: str) -> Generator[Chunk]:
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answered()
        except UserError:
            if self.messages[-1]["role"] == "user":  # refused: what comes next goes without it
                self.messages.pop()
            raise

    def again(self) -> Generator[Chunk]:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise UserError("there is nothing to answer yet")
        yield from self._answered()

    def forget(self) -> None:
        """The last message and its answer."""
        while self.messages and self.messages.pop()["role"] != "user":
            pass

    def _answered(self) -> Generator[Chunk]:
        """Keeps what was answered, also of an answer that is broken off."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = ""
        try:
            for chunk in self.llm.stream([*system, *self.messages], self._params()):
                text += chunk.text
                yield chunk
        finally:
            if text:
                self.messages.append({"role": "assistant", "content": text})

    def _params(self) -> SamplingParams:
        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=self.seed,
            max_tokens=self.max_tokens,
            drafter=self.drafter,
            k=self.k,
        )


def chat(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    sampling: topics.Sampling = SamplingConfig(),  # noqa: B008
    system: Annotated[str, Common] = "",
    max_tokens: Annotated[int, Common] = 1024,
) -> None:
    """A conversation in the terminal: type a message, or /help. After each answer stands tau, the
    mean number of tokens per verify.

    Parameters
    ----------
    system
        How the model is to answer.
    max_tokens
        Most tokens of an answer.
    """
    check_max_tokens(max_tokens)
    speculation = resolved(speculation, model)
    sampling.sampling({})  # refuse bad values before a model is loaded
    loaded: Model = loaded_model(model, speculation)
    say_model(loaded)
    with LLM(loaded, speculation, PrefixConfig()) as llm:
        talk = Talk(llm, sampling, max_tokens, sampling.seed, system)
        console.print("a message, /help or Ctrl-D", style="dim")
        for line in _lines():
            try:
                _take(talk, line)
            except UserError as problem:
                console.print(str(problem), style="red", markup=False)


def _lines() -> Iterator[str]:
    """What is typed, until its end or one of ENDS."""
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if line in ENDS:
            return
        if line:
            yield line


def _take(talk: Talk, line: str) -> None:
    if not line.startswith("/"):
        _show(talk.ask(line))
        return
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        raise UserError(f"no command /{name}: /help lists them")
    COMMANDS[name](talk, rest.strip())


def _show(chunks: Generator[Chunk]) -> None:
    """Print an answer as it comes, then how it was made. Ctrl-C ends it."""
    tokens = reads = guessed = 0
    try:
        for chunk in chunks:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            tokens, reads = tokens + len(chunk.token_ids), reads + 1
            guessed += sum(name is not None for name in chunk.guessed_by)
    except KeyboardInterrupt:
        chunks.close()  # the request ends, and what was answered is kept
    sys.stdout.write("\n")
    sys.stdout.flush()
    if reads:
        tau = (tokens - 1) / max(1, reads - 1)  # the first token is the prompt's
        console.print(f"{tokens} tokens, {guessed} of them guessed, tau {tau:.2f}", style="dim")


def _drafter(talk: Talk, name: str) -> None:
    if name and name not in talk.drafters:
        raise UserError(f"no drafter {name!r} is loaded: there are {', '.join(talk.drafters)}")
    talk.drafter = name or talk.drafter
    now = talk.drafter or talk.llm.speculation.drafter
    console.print(f"drafter {now}, of {', '.join(talk.drafters)}", markup=False)


def _k(talk: Talk, number: str) -> None:
    most = talk.llm.speculation.k
    if number and (not number.isdecimal() or int(number) > most):
        raise UserError(f"/k takes a number from 0 to {most}, as loaded (--k)")
    talk.k = int(number) if number else talk.k
    console.print(f"K = {most if talk.k is None else talk.k}, of at most {most}", markup=False)


def _seed(talk: Talk, number: str) -> None:
    if not number.isdecimal():
        raise UserError("/seed takes a number of 0 or more")
    talk.seed = int(number)


def _retry(talk: Talk, _: str) -> None:
    _show(talk.again())


def _undo(talk: Talk, _: str) -> None:
    talk.forget()


def _new(talk: Talk, _: str) -> None:
    talk.messages.clear()


def _system(talk: Talk, text: str) -> None:
    talk.system = text
    talk.messages.clear()


def _help(talk: Talk, _: str) -> None:
    console.print(HELP, markup=False, highlight=False)


COMMANDS: dict[str, Callable[[Talk, str], None]] = {
    "drafter": _drafter,
    "k": _k,
    "seed": _seed,
    "retry": _retry,
    "undo": _undo,
    "new": _new,
    "system": _system,
    "help": _help,
}
