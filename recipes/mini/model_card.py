"""What a model card needs: held-out losses, baselines, samples and the curve.

`python -m recipes.mini.model_card CONFIG CORPUS TOKENIZER RUN OUT` writes OUT/report.json,
OUT/samples.md and OUT/curve.png. The weights are judged as they are shipped: rounded to bfloat16.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from recipes.mini.baselines import baseline_losses
from recipes.mini.export import trained_params
from recipes.mini.samples import sample
from targets.tokenizer import load_tokenizer
from training.heldout import Loss, heldout_loss, heldout_nats, make_scorer, windows_of
from training.tokens import documents

WIDTHS = (1024, 4096)  # window of the headline figure, and the model's whole context


def losses(params: Any, arch: Any, backend: tokenizers.Tokenizer, texts: list[str]) -> dict:
    """Held-out loss per window width; at the full width also by position in the window."""
    score = make_scorer(arch)
    found: dict[str, Any] = {}
    for width in WIDTHS:
        windows = windows_of(backend, texts, width)
        found[f"window_{width}"] = heldout_loss(score, params, windows)._asdict()
    found["nats_by_512_tokens"] = loss_by_position(score, params, backend, texts)
    return found


def loss_by_position(
    score: Any, params: Any, backend: tokenizers.Tokenizer, texts: list[str]
) -> list[float]:
    """Mean nats of each 512-token stretch of the whole context, over texts that fill one."""
    width = WIDTHS[-1]
    long_texts = [text for text in texts if len(text) > 4 * width]
    if not long_texts:
        return []
    windows = windows_of(backend, long_texts, width)
    full = windows.scored.all(axis=1, keepdims=True)  # the first window of each document
    windows = windows._replace(scored=windows.scored & full)
    nats = heldout_nats(score, params, windows)
    stretch = np.nonzero(windows.scored)[1] // 512
    return [float(nats[stretch == part].mean()) for part in np.unique(stretch)]


def compare(corpus: Path, backend: tokenizers.Tokenizer, texts: list[str]) -> dict[str, dict]:
    """Unigram and trigram losses on the same documents."""
    stream = np.load(corpus / "train.npy")
    cut = [np.asarray(backend.encode(t, add_special_tokens=False).ids, np.int64) for t in texts]
    found: dict[str, Loss] = baseline_losses(
        stream, cut, sum(map(len, texts)), backend.get_vocab_size()
    )
    return {name: loss._asdict() for name, loss in found.items()}


def draw_curve(log: Path, baselines: dict[str, dict], title: str, out: Path) -> None:
    """Training and held-out loss in nats per token over steps, with the baselines' levels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, width in (("train", 0.6), ("heldout", 2.0)):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=width)
    trigram = baselines["trigram"]["nats_per_token"]
    axes.axhline(trigram, linestyle=":", color="grey", label="trigram baseline")
    axes.set(xlabel="step", ylabel="nats per token", title=title, ylim=(1.2, trigram + 0.6))
    axes.legend()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def write_samples(samples: list[dict[str, str]], out: Path) -> None:
    """Markdown with one block per completion."""
    blocks = [
        f"### {number}\n````\n{item['prompt']}⟨…⟩{item['completion']}\n````\n"
        for number, item in enumerate(samples, 1)
    ]
    out.write_text("\n".join(blocks))


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "corpus", "tokenizer", "run", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    params, arch, step = trained_params(arguments.config, arguments.run)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    backend = tokenizers.Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    texts = [row["text"] for row in documents(arguments.corpus / "heldout.jsonl")]
    report = {"step": step, **losses(params, arch, backend, texts)}
    report |= compare(arguments.corpus, backend, texts)
    write_samples(
        sample(params, arch, load_tokenizer(arguments.tokenizer)), arguments.out / "samples.md"
    )
    draw_curve(
        arguments.run / "log.jsonl", report, arguments.config.stem, arguments.out / "curve.png"
    )
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
