"""What the sampler keeps against the warpers of transformers, in the order of its `generate`."""

import numpy as np
import pytest

from course_lib.engine.sampling import Sampler

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CASES = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},  # Qwen3 without thinking
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},  # with thinking
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 0.2, "top_k": 7, "top_p": 0.99, "min_p": 0.3},
    {"temperature": 5.0, "top_p": 0.01},
    {"temperature": 1.0},
]


def their_probabilities(logits, temperature, top_k=None, top_p=1.0, min_p=0.0):
    from transformers.generation import logits_process

    warpers = [logits_process.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        warpers.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(logits_process.MinPLogitsWarper(min_p))
    scores = torch.from_numpy(logits)[None]
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores[0].double(), -1).numpy(), torch.isfinite(scores[0]).numpy()


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_same_tokens_stay_with_the_same_probabilities(options):
    different = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(rng.integers(2, 3000)) * 3).astype(np.float32)
        probabilities, stay = their_probabilities(logits, **options)
        ids, weights = Sampler(**options).kept(logits)
        if ids.tolist() != np.flatnonzero(stay).tolist():
            # Both sum in float32 or round weights to it: the border may lie one token away.
            assert len(set(ids.tolist()) ^ set(np.flatnonzero(stay).tolist())) == 1
            different += 1
            continue
        got = weights / weights.sum(dtype=np.float64)
        np.testing.assert_allclose(got, probabilities[ids], rtol=1e-4, atol=1e-30)
    assert different <= 2
