"""The head of E2B's and E4B's assistants: only words of the best-fitting clusters are scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.assistant.spec import AssistantSpec
from targets.cuda.reader import Reader


@dataclass(frozen=True)
class OrderedHead:
    """centroids [C, d] and rows [C, words, d], a cluster's rows side by side, in the wide dtype;
    ids [C, words] int32: which word each is; from `vocab` on, none."""

    centroids: Tensor
    rows: Tensor
    ids: Tensor
    read: int
    vocab: int
    softcap: float | None

    @classmethod
    def of(cls, spec: AssistantSpec, reader: Reader, vocab: int) -> OrderedHead:
        """vocab: the target's, which may have ids beyond the assistant's."""
        assert spec.clusters
        own, count = spec.arch.vocab, spec.clusters.count
        ids = reader.numbers("token_ordering")
        rows = reader.table("head")[ids.clamp(max=own - 1)]

        def split(part: Tensor) -> Tensor:
            return part.view(count, own // count, *part.shape[1:])

        wide = reader.table("centroids")
        return cls(
            wide, split(rows), split(ids.int()), spec.clusters.read, vocab, spec.arch.softcap
        )

    def logits(self, y: Tensor) -> Tensor:
        """`AssistantOps.ordered` of the normed states y [M, d] float32, in torch."""
        x = y.to(self.rows.dtype)
        best = (x @ self.centroids.T).float().topk(self.read, -1).indices
        scores = (self.rows[best] @ x[:, None, :, None])[..., 0].float().flatten(1)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        out = scores.new_full((len(y), self.vocab), -torch.inf)
        ids = self.ids[best].flatten(1).long()
        scores = scores.masked_fill(ids >= self.vocab, -torch.inf)
        return out.scatter_reduce_(1, ids.clamp(max=self.vocab - 1), scores, "amax")
