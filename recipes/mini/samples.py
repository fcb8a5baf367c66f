"""Sampled completions for a person to read: raw Python and chat, at one temperature.

Only training needs this cache-free sampler: it recomputes the whole row for each token, and works
on parameters that are not yet a checkpoint.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from targets.arch import Arch
from targets.jax.model import head, sequence_hidden
from targets.tokenizer import Tokenizer

RAW = (
    "",
    "import os\n",
    "def read_lines(path):\n",
    "class Stack:\n",
    "def fibonacci(n: int) -> int:\n    ",
    'def is_palindrome(text: str) -> bool:\n    """Check whether the text reads the same '
    'backwards.\n    """\n',
    'def mean(values):\n    """Return the arithmetic mean of values."""\n',
    "    def __init__(self, name, size=None):\n",
    "for line in lines:\n",
    "import numpy as np\n\n\ndef normalize(",
)
CHAT = (
    "Write a Python function `add(a, b)`. Return the sum of a and b.",
    "Write a Python function `count_words(text)`. Count how often each word occurs in the text.",
    "Return the largest element of a list.",
    "Implement `is_even` in Python: Return True if the number is even.",
    'Complete this function.\n\ndef factorial(n):\n    """Return n factorial."""',
    "Write a Python function `flatten(items)`. Flatten a nested list.",
    "Load a JSON file and return its contents as a dict.",
    "Write a Python function `reverse_words(sentence)`. Reverse the order of the words.",
    'def remove_prefix(text, prefix):\n    """Remove the prefix from text if it is there."""',
    "Write a class for a bank account with deposit and withdraw.",
)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of ten raw prompts and ten chats."""
    chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHAT]
    return [tokenizer.encode(text) for text in RAW] + chats


@partial(jax.jit, static_argnames=("arch", "temperature", "stops"))
def _fill(
    params: Any, arch: Arch, rows: Any, lengths: Any, temperature: float, stops: Any, key: Any
) -> Any:
    """rows [B, W] filled behind each row's `lengths` prompt tokens; 0 (<pad>) after a stop."""

    def body(position: Any, state: Any) -> Any:
        rows, done = state
        hidden = sequence_hidden(params, arch, rows).last[:, position - 1]
        logits = head(params, arch, hidden) / temperature
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
        free = position >= lengths
        token = jnp.where(free, jnp.where(done, 0, drawn), rows[:, position])
        done |= free & jnp.isin(token, jnp.asarray(stops))
        return rows.at[:, position].set(token.astype(jnp.int32)), done

    done = jnp.zeros(rows.shape[0], bool)
    return jax.lax.fori_loop(1, rows.shape[1], body, (rows, done))[0]


def sample(
    params: Any,
    arch: Arch,
    tokenizer: Tokenizer,
    temperature: float = 0.8,
    width: int = 320,
    seed: int = 0,
) -> list[dict[str, str]]:
    """{prompt, completion} for each prompt; at most `width` tokens in all per row."""
    asked = prompts(tokenizer)
    rows = np.zeros((len(asked), width), np.int32)
    for row, ids in zip(rows, asked, strict=True):
        row[: len(ids)] = ids
    lengths = np.asarray([len(ids) for ids in asked])
    key = jax.random.key(seed)
    filled = _fill(params, arch, rows, lengths, temperature, tokenizer.stop_ids, key)
    return [
        {
            "prompt": tokenizer.decode(ids, skip_special=False),
            "completion": tokenizer.decode(_unpadded(row[len(ids) :]), skip_special=False),
        }
        for ids, row in zip(asked, np.asarray(filled), strict=True)
    ]


def _unpadded(ids: np.ndarray) -> list[int]:
    return [int(token) for token in ids if token != 0]
