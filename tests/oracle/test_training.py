"""Training of the shipped model: resumes to the same weights, exports what the engine loads."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from course_lib.engine import Engine
from course_lib.paths import MODELS, ROOT

torch = pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "tools"))

import train_needle_model as training  # noqa: E402
from needle_model.batches import make_batch  # noqa: E402
from needle_model.network import Network, Shape, export  # noqa: E402
from needle_model.objective import loss, probe_loss  # noqa: E402
from needle_model.tokenizer import write_tokenizer  # noqa: E402

STAGES = (training.Stage(2, 128, 2), training.Stage(2, 256, 1))
TINY = {"hidden": 32, "layers": 2, "mlp": 32, "head_dim": 16}


@pytest.fixture(scope="module")
def tokenizer():
    return training.build_tokenizer()


@pytest.fixture(scope="module")
def writer(tokenizer):
    return training.DocumentWriter(tokenizer)


def new_run(folder, tokenizer) -> training.Run:
    folder.mkdir(exist_ok=True)
    return training.Run(folder, STAGES, Shape(vocab=tokenizer.get_vocab_size(), **TINY))


def steps(run, writer, count) -> None:
    for _ in range(count):
        run.log(run.train_step(writer, torch.float32))


def test_an_interrupted_run_goes_on_to_the_same_weights_and_log(tmp_path, tokenizer, writer):
    whole = new_run(tmp_path / "whole", tokenizer)
    steps(whole, writer, 4)
    first = new_run(tmp_path / "halves", tokenizer)
    steps(first, writer, 2)
    first.save()
    steps(first, writer, 1)  # lost: after the checkpoint
    second = new_run(tmp_path / "halves", tokenizer)
    assert second.step == 2
    steps(second, writer, 2)
    for a, b in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)
    logged = [line.split(",")[0] for line in (tmp_path / "halves/log.csv").read_text().split()[1:]]
    assert logged == ["1", "2", "3", "4"]


def test_every_step_of_the_schedule_has_its_stage():
    lengths = [training.stage_of(step, training.STAGES).length
               for step in range(sum(s.steps for s in training.STAGES))]
    assert lengths == sorted(lengths) and set(lengths) == {s.length for s in training.STAGES}
    assert lengths.count(2176) == training.STAGES[-1].steps


def test_hints_fade_and_probes_rise():
    assert training.hint_weight(0) == 1.0 and training.hint_weight(training.HINT_STEPS) == 0.0
    assert training.probe_weight(training.PROBE_FROM) == 0.0
    assert training.probe_weight(training.PROBE_FROM + 100) == training.PROBE_WEIGHT


def test_the_loss_falls_when_the_network_learns_one_batch(tokenizer, writer):
    torch.manual_seed(1)
    network = Network(Shape(vocab=tokenizer.get_vocab_size(), **TINY))
    batch = make_batch(writer, 5, 2, 128, hints=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    seen = []
    for _ in range(12):
        total, readings = loss(network, batch, 1.0, 1.0, phase=0)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        seen.append(readings)
    for name in ("loss", "hint_loss", "probe_loss"):
        assert seen[-1][name] < 0.8 * seen[0][name], name


def test_probe_loss_is_that_of_its_definition(tokenizer, writer):
    """Against plain loops: softmax over every fourth key up to the query, mass on the span."""
    network = Network(Shape(vocab=tokenizer.get_vocab_size(), **TINY))
    batch = make_batch(writer, 9, 2, 128, hints=False)
    with torch.no_grad():
        _, heads = network(batch.ids)
        got = float(probe_loss(network, heads, batch, phase=3))
        costs = []
        for layer, head in training_heads():
            for d, query, first, last in batch.probes.tolist():
                q = heads[layer][0][d, head, query].double()
                keys = [p for p in range(batch.ids.shape[1])
                        if p % 4 == (3 + d) % 4 and p <= query]
                scores = [float(q @ heads[layer][1][d, head, p].double()) / 4 for p in keys]
                weights = np.exp(np.array(scores) - max(scores))
                inside = np.array([first <= p <= last for p in keys])
                costs.append(-np.log(weights[inside].sum() / weights.sum()))
    assert got == pytest.approx(np.mean(costs), rel=1e-4)


def training_heads():
    from needle_model.documents import COPY_HEADS

    return COPY_HEADS


def test_the_engine_loads_an_export_and_computes_the_same_logits(tmp_path, tokenizer):
    torch.manual_seed(2)
    shape = replace(Shape(vocab=tokenizer.get_vocab_size()), **TINY)
    network = Network(shape)
    for p in network.parameters():  # what float16 keeps, so that both sides hold the same weights
        p.data = p.data.half().float()
    export(network, tmp_path)
    write_tokenizer(tokenizer, tmp_path)
    ids = list(range(5, 60))
    with torch.no_grad():
        expected = network.logits(network(torch.tensor([ids]))[0])[0].numpy()
    got = Engine.load(tmp_path).forward(ids)
    # float32 sums of a few hundred terms on both sides, in other orders
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_the_shipped_weights_are_what_training_would_export(tokenizer):
    """Same names, shapes and type as a fresh network: the shipped file belongs to this code."""
    from safetensors import safe_open

    network = Network(Shape(vocab=tokenizer.get_vocab_size()))
    expected = {"model." + n: tuple(p.shape) for n, p in network.state_dict().items()}
    with safe_open(MODELS / "needle-qwen3" / "model.safetensors", framework="np") as f:
        stored = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
    assert stored == expected
