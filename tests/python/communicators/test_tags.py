"""Errors say in words what an operation of the optimizer was for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from mdas import _core
from mdas.communicator import CoreCommunicator, tags
from mdas.errors import MismatchError
from mdas.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

TAGS = {
    tags.gradient(3): "gradient bucket 3",
    tags.sketch(3, second=False): "sketch of bucket 3, first exchange",
    tags.sketch(12, second=True): "sketch of bucket 12, second exchange",
    tags.TALLY: "tally",
    tags.LOSS: "loss of a closure",
    tags.JOINING: "end of a join",
    tags.SHARDS: "mesh of the DTensor parameters",
    7: "tag 0x7",
}


@pytest.fixture
def communicators():
    engines = _core.loopback(2, _core.EngineSettings(timeout=20))
    yield [CoreCommunicator(engine, 0, engine.rank, 2) for engine in engines]
    for engine in engines:
        engine.shutdown(1.0)


@pytest.mark.parametrize("tag", TAGS, ids=TAGS.values())
def test_both_sides_of_a_mismatch(tag, communicators):
    other = tags.gradient(0)
    works = [
        communicator.allreduce(torch.ones(5), torch.ones(5), tag=own)
        for communicator, own in zip(communicators, (tag, other), strict=True)
    ]
    for work in works:
        for _ in range(2):  # a work tells it again
            with pytest.raises(MismatchError) as caught:
                work.wait()
            assert f"allreduce(sum, 5 x float32, {TAGS[tag]})" in str(caught.value)
            assert "allreduce(sum, 5 x float32, gradient bucket 0)" in str(caught.value)


def test_a_rank_that_averages_buffers_while_another_trains(communicators):
    """What a script can get wrong, through the optimizer."""

    def rank(communicator):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, schedule="sync")
        with pytest.raises(MismatchError) as caught:
            if communicator.rank == 0:
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
            else:
                optimizer.sync_buffers()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(rank, communicators, timeout=40):
            assert "x float32, gradient bucket 0)" in message
            assert "x float32, model, options or weights of all ranks)" in message
