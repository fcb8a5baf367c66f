"""`specdec perplexity`: how well a checkpoint predicts a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from specdec.cli import topics
from specdec.cli.console import command_record, console, print_json, read_text, say_model
from specdec.cli.progress import Bar
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.evaluation.perplexity import measure, windows


def perplexity(
    text: Path,
    /,
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    window: int = 1024,
    stride: int = 512,
    json: topics.Json = False,
) -> None:
    """Perplexity of a text file: sliding window, BOS in each, every token scored once.

    Parameters
    ----------
    text
        A UTF-8 text file.
    window
        Tokens per window, BOS included.
    stride
        New tokens per window; the rest is left context.
    """
    content = read_text(text)
    loaded = loaded_model(model, SpeculationConfig(), prove=False)
    say_model(loaded)
    ids = loaded.tokenizer.encode(content)
    bos, ids = ids[0], ids[1:]
    if window > loaded.target.arch.max_position:
        raise UserError(f"--window {window} is longer than the model's context")
    window_nll = loaded.backend.scorer(loaded.target)
    with Bar(console, "scoring", sum(1 for _ in windows(ids, bos, window, stride))) as bar:

        def score(tokens: list[int]):
            bar.advance()
            return window_nll(tokens)

        result = measure(ids, bos, window, stride, score)
    console.print(
        f"perplexity [bold]{result.perplexity:.3f}[/bold] "
        f"(95 % {result.low:.3f} to {result.high:.3f}), {result.nll:.4f} nats per token, "
        f"{result.tokens} tokens in {result.windows} windows"
    )
    if json:
        values = asdict(result) | {"perplexity": result.perplexity}
        print_json(command_record("perplexity", model=loaded.config) | values)
