"""`specdec generate`: stream one answer, and report tau, acceptance and speed."""

from __future__ import annotations

import sys
from pathlib import Path

from drafters.registry import resolved
from specdec.assembly.engine import make_engine
from specdec.cli import topics
from specdec.cli.console import command_record, console, print_json, read_text, say_model
from specdec.cli.hosts import HostsConfig, joined
from specdec.cli.start import loaded_model, warm_up
from specdec.core.config import ModelConfig, SamplingConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.stats import Acceptance
from specdec.core.types import Sequence


def generate(
    prompt: str = "",
    /,
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    sampling: topics.Sampling = SamplingConfig(),  # noqa: B008
    hosts: HostsConfig = HostsConfig(),  # noqa: B008
    prompt_file: Path | None = None,
    chat: bool = False,
    max_tokens: int = 128,
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
    """
    text = _prompt(prompt, prompt_file)
    speculation = resolved(speculation, model)
    sampling.sampling({})  # refuse bad values before a model is loaded
    topics = {"model": model, "speculation": speculation, "sampling": sampling}
    asked = {"prompt": text, "chat": chat, "max_tokens": max_tokens}
    with joined(hosts, model, speculation, sampling, **asked):
        loaded = loaded_model(model, speculation)
        say_model(loaded)
        tokenizer = loaded.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else None
        ids = ids or tokenizer.encode(text)
        seq = Sequence(
            ids,
            sampling.sampling(tokenizer.defaults),
            max_tokens=max_tokens,
            stop_ids=frozenset(tokenizer.stop_ids),
        )
        engine = make_engine(loaded, speculation)
        engine.check(seq)
        warm_up(engine, [seq.sampling])
        seconds = _stream(engine, seq, tokenizer, "" if chat else text)
        rate = (seq.emitted - 1) / seconds if seconds else 0.0
        console.print(_summary(seq, rate), soft_wrap=True)
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


def _stream(engine: Engine, seq: Sequence, tokenizer, echo: str) -> float:
    """Print tokens as they come; returns the engine's decoding time in seconds. Arrival times can't
    be used: a device loop's first cycles arrive together with the token that prefill chose."""
    text, before = tokenizer.stream(), engine.times.decoding
    sys.stdout.write(echo)
    for event in engine.run([seq]):
        if event.error is not None:
            raise UserError(event.error)
        sys.stdout.write("".join(text.step(token) for token in event.tokens))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
    sys.stdout.flush()  # before the statistics on stderr
    return engine.times.decoding - before


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
