"""Documents of one length stacked into tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needle_model.documents import DocumentWriter


@dataclass
class Batch:
    """ids [B, n] int64, weights [B, n] float32 of predicting each token, is_value [B, n] bool.

    hints: (layer, head) → int64 [m, 4] rows (document, query, first, last); probes: such rows."""

    ids: Tensor
    weights: Tensor
    is_value: Tensor
    hints: dict[tuple[int, int], Tensor]
    probes: Tensor


def make_batch(
    writer: DocumentWriter, first_seed: int, count: int, length: int, *, hints: bool
) -> Batch:
    """`count` documents with seeds first_seed, first_seed + 1, …; short ones end in padding."""
    documents = [writer.write(first_seed + i, length) for i in range(count)]
    n = max(len(d.ids) for d in documents)
    ids = torch.zeros(count, n, dtype=torch.int64)
    weights = torch.zeros(count, n)
    is_value = torch.zeros(count, n, dtype=torch.bool)
    rows: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for i, d in enumerate(documents):
        m = len(d.ids)
        ids[i, :m] = torch.tensor(d.ids)
        weights[i, :m] = torch.tensor(d.weights)
        is_value[i, :m] = torch.tensor(d.is_value)
        if hints:
            for head, items in d.hints.items():
                rows.setdefault(head, []).extend((i, q, a, b) for q, a, b in items)
    probes = torch.tensor([(i, *row) for i, d in enumerate(documents) for row in d.probes])
    return Batch(ids, weights, is_value, {h: torch.tensor(r) for h, r in rows.items()}, probes)
