"""The embedded family's tokenizer: byte-level BPE over Python, with Gemma's special tokens.

`python -m recipes.mini.mini_tokenizer CORPUS OUT` learns it from CORPUS/train.jsonl and writes the
checkpoint's tokenizer files into OUT.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from targets import mini

VOCABULARY = 4096
# Gemma's order; the first five have Gemma's ids too.
SPECIAL = (
    ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    + ["<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
    + ['<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"]
)
# One digit a token. Words keep their underscores and one space in front. A newline never joins
# what stands before it, and indentation is a piece of its own: a prompt that ends with ":" or
# with "\n" is then cut as the same text was cut in training.
PIECES = r" ?\p{N}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s*\n| {2,}|\s+"
TEMPLATE = "chat_template.jinja"
"""The family's template: kept with its checkpoints, in `targets/mini/assets`."""


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> tokenizers.Tokenizer:
    """Learn a byte-level BPE of `size` entries, specials included."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def tokenizer_config(context: int) -> dict[str, Any]:
    """`tokenizer_config.json`: the generic class, since Gemma's own would rebuild the pieces."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "padding_side": "left",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }


def generation_config() -> dict[str, Any]:
    """`generation_config.json`: Gemma's stop tokens, sampling that suits a small model."""
    stops = ["<eos>", "<turn|>", "<|tool_response>"]
    return {
        "bos_token_id": SPECIAL.index("<bos>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        "eos_token_id": [SPECIAL.index(token) for token in stops],
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 64,
        "top_p": 0.95,
    }


def write_tokenizer(backend: tokenizers.Tokenizer, out: Path, context: int = 4096) -> None:
    """Write the four tokenizer files of a checkpoint into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / "tokenizer.json"))
    (out / TEMPLATE).write_bytes((mini.path("mini") / TEMPLATE).read_bytes())
    for name, value in (
        ("tokenizer_config.json", tokenizer_config(context)),
        ("generation_config.json", generation_config()),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")


def texts_of(path: Path, every: int = 1) -> Iterator[str]:
    """The texts of a corpus file, each `every`-th document."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % every == 0:
                yield json.loads(line)["text"]


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=VOCABULARY)
    parser.add_argument("--every", type=int, default=1, help="learn from each n-th document")
    arguments = parser.parse_args()
    texts = texts_of(arguments.corpus / "train.jsonl", arguments.every)
    backend = train_tokenizer(texts, arguments.size)
    write_tokenizer(backend, arguments.out)
    heldout = list(texts_of(arguments.corpus / "heldout.jsonl"))
    tokens = sum(len(e.ids) for e in backend.encode_batch(heldout, add_special_tokens=False))
    characters = sum(map(len, heldout))
    ratio = round(characters / tokens, 4)
    print(json.dumps({"entries": backend.get_vocab_size(), "characters_per_token": ratio}))


if __name__ == "__main__":
    main()
