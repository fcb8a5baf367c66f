"""Whole sequences through the target's own forward, with attention cut into blocks.

The plain `sequence_logits` compares each token with all T others on every layer. Here a sequence
is fed as T / window rows of one window each: a sliding layer's row then sees its own block and
the one before (2 x window keys), a global layer's row sees the whole sequence. Same function,
same numbers up to rounding; a third of the scores at T = 1024 and window 128.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from targets.arch import Arch, LayerSpec
from targets.jax.cache import LayerCache
from targets.jax.kv_exchange import attend_visible, shared_stores
from targets.jax.model import forward, head, sequence_logits
from targets.jax.params import Params


class BlockExchange(NamedTuple):
    """A `targets.jax.kv_exchange.KVExchange` for rows R = batch * blocks of `size` tokens each."""

    batch: int
    blocks: int
    size: int

    def scope(self) -> Any:
        return self

    def positions(self, tokens: int) -> Any:
        """[R, T]."""
        starts = jnp.tile(jnp.arange(self.blocks) * self.size, self.batch)
        return starts[:, None] + jnp.arange(tokens)

    def exchange(self, stored: Any, repeat: Any, layer: LayerSpec, k: Any, v: Any) -> tuple:
        """k, v [R, T, K, D] -> what each row may see [R, S, K, D]; stored if other layers share
        it."""
        k, v = self._reach(layer, k), self._reach(layer, v)
        if stored is not None:
            stored = LayerCache(stored.k.at[repeat].set(k), stored.v.at[repeat].set(v))
        return stored, (k, v)

    def recall(self, stored: Any, repeat: int) -> Any:
        """What `exchange` kept."""
        return stored.k[repeat], stored.v[repeat]

    attend = attend_visible

    def visible(self, layer: LayerSpec, tokens: int, size: int) -> Any:
        """[R, T, S]."""
        query = self.positions(tokens)[..., None]
        first = self.positions(1)[..., None] - self.size if layer.sliding else 0
        key = first + jnp.arange(size)
        seen = (key >= 0) & (key <= query)
        return seen if layer.window is None else seen & (key > query - layer.window)

    def reach(self, layer: LayerSpec) -> int:
        """Keys that a row of this layer is compared with."""
        return 2 * self.size if layer.sliding else self.blocks * self.size

    def _reach(self, layer: LayerSpec, x: Any) -> Any:
        whole = x.reshape(self.batch, self.blocks, self.size, *x.shape[2:])
        if layer.sliding:
            before = jnp.pad(whole[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (whole.ndim - 2))
            seen = jnp.concatenate([before, whole], 2)
        else:
            sequence = whole.reshape(self.batch, 1, -1, *x.shape[2:])
            seen = jnp.broadcast_to(sequence, (self.batch, self.blocks, *sequence.shape[2:]))
        return seen.reshape(-1, *seen.shape[2:])


def block_logits(params: Params, arch: Arch, tokens: Any) -> Any:
    """tokens [B, T] -> soft-capped logits [B, T, V] float32: `sequence_logits`, cheaper.

    Where T is not a multiple of the window it is `sequence_logits` itself.
    """
    batch, length = tokens.shape
    windows = {layer.window for layer in arch.layers if layer.window is not None}
    size = max(windows, default=length)
    if length % size or length == size:
        return sequence_logits(params, arch, tokens)
    exchange = BlockExchange(batch, length // size, size)
    rows = tokens.reshape(-1, size)
    stored = shared_stores(params, arch, lambda layer: (len(rows), exchange.reach(layer)))
    hidden = forward(params, arch, stored, rows, exchange, ())[1]
    return head(params, arch, hidden.last.reshape(batch, length, -1))
