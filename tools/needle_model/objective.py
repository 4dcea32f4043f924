"""The training loss: weighted next-token loss plus, early on, the attention hints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from needle_model.batches import Batch
from needle_model.documents import COPY_HEADS
from needle_model.network import Network

MAX_HINTS_PER_HEAD = 768  # enough for a stable gradient; all of them would cost as much as a layer


def hint_loss(network: Network, heads: list[tuple[Tensor, Tensor]], batch: Batch) -> Tensor:
    """Mean −log of the attention that hinted heads give to the hinted spans."""
    total = torch.zeros(())
    n = batch.ids.shape[1]
    positions = torch.arange(n)
    for (layer, head), rows in batch.hints.items():
        if len(rows) > MAX_HINTS_PER_HEAD:
            keep = torch.linspace(0, len(rows) - 1, MAX_HINTS_PER_HEAD).long()
            rows = rows[keep]
        doc, query, first, last = rows.T
        q, k = heads[layer][0][:, head].float(), heads[layer][1][:, head].float()
        scores = (q @ k.transpose(1, 2) * network.shape.head_dim**-0.5)[doc, query]
        scores = scores.masked_fill(positions > query[:, None], -torch.inf)
        inside = (positions >= first[:, None]) & (positions <= last[:, None])
        log_mass = torch.logsumexp(scores.masked_fill(~inside, -torch.inf), -1)
        total = total - (log_mass - torch.logsumexp(scores, -1)).mean()
    return total / max(1, len(batch.hints))


PROBE_STRIDE = 4  # the engine's probe of a full block: 8 of 32 keys


def probe_loss(
    network: Network, heads: list[tuple[Tensor, Tensor]], batch: Batch, phase: int
) -> Tensor:
    """Mean −log of the attention on the fact when only every fourth key can be seen.

    phase: which of the four; it changes from step to step, so each of the fact's last tokens
    learns to answer the query, as block selection by probes needs."""
    total = torch.zeros(())
    scale = network.shape.head_dim**-0.5
    for layer, head in COPY_HEADS:
        q, k = heads[layer][0][:, head].float(), heads[layer][1][:, head].float()
        for d in range(len(batch.ids)):
            _, query, first, last = batch.probes[batch.probes[:, 0] == d].T
            seen = torch.arange((phase + d) % PROBE_STRIDE, batch.ids.shape[1], PROBE_STRIDE)
            scores = q[d, query] @ k[d, seen].T * scale
            scores = scores.masked_fill(seen > query[:, None], -torch.inf)
            inside = (seen >= first[:, None]) & (seen <= last[:, None])
            log_mass = torch.logsumexp(scores.masked_fill(~inside, -torch.inf), -1)
            total = total - (log_mass - torch.logsumexp(scores, -1)).sum()
    return total / max(1, len(COPY_HEADS) * len(batch.probes))


def loss(
    network: Network, batch: Batch, hint_weight: float, probe_weight: float, phase: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch and its readings: language, hint and probe loss, value accuracy."""
    hidden, heads = network(batch.ids)
    weights = batch.weights[:, 1:]
    scored = weights > 0
    targets = batch.ids[:, 1:][scored]
    logits = network.logits(hidden[:, :-1][scored])
    nll = F.cross_entropy(logits, targets, reduction="none")
    w = weights[scored]
    language = (nll * w).sum() / w.sum()
    values = batch.is_value[:, 1:][scored]
    hits = (logits.argmax(-1) == targets)[values]
    readings = {"loss": float(language.detach()), "value_accuracy": float(hits.float().mean())}
    total = language
    if hint_weight > 0 and batch.hints:
        hints = hint_loss(network, heads, batch)
        readings["hint_loss"] = float(hints.detach())
        total = total + hint_weight * hints
    if probe_weight > 0 and len(batch.probes):
        probes = probe_loss(network, heads, batch, phase)
        readings["probe_loss"] = float(probes.detach())
        total = total + probe_weight * probes
    return total, readings
