"""`specdec generate`: stream one answer, and report tau, acceptance and speed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from drafters.registry import resolved
from serve.runner import Update
from serve.stream import ChoiceText
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model
from specdec.audit.identity import identity_of
from specdec.audit.making import Ended, receipt_of
from specdec.cli import topics
from specdec.cli.console import (
    check_file,
    command_record,
    console,
    print_json,
    read_text,
    say_model,
)
from specdec.cli.hosts import HostsConfig, joined
from specdec.cli.start import SHOWN, check_max_tokens, loaded_model, warm_up
from specdec.core.config import Common, ModelConfig, SamplingConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.stats import Acceptance
from specdec.core.types import Sequence, TokenLogprob
from specdec.core.writing import write_whole
from targets.tokenizer import Tokenizer, check_characters


def generate(
    prompt: Annotated[str, Common] = "",
    /,
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    sampling: topics.Sampling = SamplingConfig(),  # noqa: B008
    hosts: HostsConfig = HostsConfig(),  # noqa: B008
    prompt_file: Annotated[Path | None, Common] = None,
    chat: Annotated[bool, Common] = False,
    max_tokens: Annotated[int, Common] = 128,
    receipt: Annotated[Path | None, Common] = None,
    json: topics.Json = False,
) -> None:
    """Continue a prompt, streaming, and report tokens, tau, acceptance and speed.

    Parameters
    ----------
    prompt
        Text to continue; with --chat, the user's message.
    prompt_file
        Read the prompt from a file instead.
    chat
        Apply the checkpoint's chat template.
    max_tokens
        Most tokens to generate.
    receipt
        Write a file with the request and the answer, which `specdec verify` proves by replay. It
        has the log-probability of each token.
    """
    text = _prompt(prompt, prompt_file)
    check_characters(text, "the prompt")
    check_max_tokens(max_tokens)
    speculation = resolved(speculation, model)
    if receipt is not None:
        check_file(receipt, "--receipt")
    sampling.sampling({})  # refuse bad values before a model is loaded
    topics = {"model": model, "speculation": speculation, "sampling": sampling}
    asked = {"prompt": text, "chat": chat, "max_tokens": max_tokens}
    with joined(hosts, model, speculation, sampling, **asked) as lines:
        loaded = loaded_model(model, speculation)
        say_model(loaded)
        tokenizer = loaded.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else None
        ids = ids or tokenizer.encode(text)
        logprobs = None if receipt is None else 0
        seq = Sequence(
            ids,
            replace(sampling.sampling(tokenizer.defaults), logprobs=logprobs),
            max_tokens=max(1, min(max_tokens, loaded.target.max_len - len(ids))),
            stop_ids=frozenset(tokenizer.stop_ids),
        )
        engine = make_engine(loaded, speculation)
        engine.check(seq)
        warm_up(engine, [seq.sampling])
        seconds, chosen = _stream(engine, seq, tokenizer, "" if chat else text)
        rate = (seq.emitted - 1) / seconds if seconds else 0.0
        console.print(_summary(seq, rate), soft_wrap=True)
        if receipt is not None and (lines is None or lines.leads):
            _write_receipt(receipt, loaded, seq, chosen)
        if json:
            topics["model"] = loaded.config
            record = command_record("generate", **topics, hosts=hosts)
            output = tokenizer.decode(seq.tokens[seq.prompt_len :])
            print_json(record | _report(seq, rate, output))


def _prompt(prompt: str, prompt_file: Path | None) -> str:
    if prompt_file is not None:
        if prompt:
            raise UserError("give a prompt or --prompt-file, not both")
        prompt = read_text(prompt_file)
    if not prompt:
        raise UserError('the prompt is empty: specdec generate "def quicksort(items):"')
    return prompt


def _stream(
    engine: Engine, seq: Sequence, tokenizer: Tokenizer, echo: str
) -> tuple[float, list[TokenLogprob]]:
    """Print tokens as they come; returns the engine's decoding time in seconds, and the tokens'
    log-probabilities if the sequence has them. Arrival times can't be used: a device loop's first
    cycles arrive together with the token that prefill chose."""
    text, before = tokenizer.stream(), engine.times.decoding
    chosen: list[TokenLogprob] = []
    sys.stdout.write(echo)
    for event in engine.run([seq]):
        if event.error is not None:
            raise UserError(event.error)
        chosen += event.logprobs or ()
        sys.stdout.write("".join(text.step(token) for token in event.tokens))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
    sys.stdout.flush()  # before the statistics on stderr
    return engine.times.decoding - before, chosen


def _write_receipt(file: Path, loaded: Model, seq: Sequence, chosen: list[TokenLogprob]) -> None:
    """Raises UserError where it can't be written."""
    ids = seq.tokens[seq.prompt_len :]
    finish = "stop" if seq.finish == "stop" else "length"
    with SHOWN("digesting the weights"):
        identity = identity_of(loaded)
    text = ChoiceText(loaded.tokenizer).feed(Update(0, tuple(ids), finish=finish)).text
    made = receipt_of(identity, seq, Ended(ids, finish, text=text, logprobs=chosen))
    write_whole(file, made.to_text())
    console.print(f"receipt: {file}; prove it: specdec verify {file}", markup=False, soft_wrap=True)


def _summary(seq: Sequence, rate: float) -> str:
    acceptance = seq.acceptance
    return (
        f"[bold]{seq.emitted}[/bold] tokens ({seq.finish}), "
        f"tau [bold]{acceptance.tau:.2f}[/bold] tokens per verify, accepted "
        f"[bold]{acceptance.accepted} of {acceptance.drafted}[/bold] drafted, "
        f"[bold]{rate:.1f}[/bold] tok/s after the first"
    )


def _report(seq: Sequence, rate: float, output: str) -> dict[str, object]:
    acceptance: Acceptance = seq.acceptance
    return {
        "text": output,
        "tokens": seq.emitted,
        "prompt_tokens": seq.prompt_len,
        "finish_reason": seq.finish,
        "tau": acceptance.tau,
        "drafted": acceptance.drafted,
        "accepted": acceptance.accepted,
        "tokens_per_second": rate,
    }
