"""The gradient line-up adds up single gradients, and gives what whole batches give."""

import pytest
import torch

from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.audits.gradient_lineup import Updates, _together, find_distances
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from toys import fashion, leaky


@pytest.mark.parametrize("size", [1, 3])
def test_single_gradients_add_up_to_those_of_batches(size: int) -> None:
    every, model = fashion(size + 5), leaky()
    batch = Batch(every.images[:size], every.labels[:size])
    candidates = torch.cat([every.images[size:], batch.images[-1:]])
    seen = Client(model, classes=10).share(batch.images, batch.labels, seed=0).seen
    fresh = FreshDraws(seen, (), generator(0))
    updates = Updates.of(seen, candidates, fresh)
    found = find_distances(updates, seen, batch, size - 1, candidates, fresh)
    expected = []
    for candidate in candidates:
        images = batch.images.clone()
        images[-1] = candidate
        other = Client(model, classes=10).share(images, batch.labels, seed=0).seen
        ours, theirs = (
            torch.cat([g.flatten() for g in one.gradients.values()]) for one in (other, seen)
        )
        expected.append(1 - float(torch.cosine_similarity(ours, theirs, dim=0)))
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-9)
    assert int(found.argmin()) == len(candidates) - 1
    whole = _together(updates, seen, batch, size - 1, candidates, fresh)
    torch.testing.assert_close(whole, found, rtol=1e-6, atol=1e-9)
