"""`mdas.ddp_hook`: DistributedDataParallel, delayed and predicted, against one process."""

from __future__ import annotations

import math
from typing import Any

import ddp_ranks
import pytest
import torch
import torch.distributed as dist
from ddp_ranks import STEPS, WARMUP, flat, loss, net, sgd
from torch.nn.parallel import DistributedDataParallel

import mdas
from mdas.communicator import AloneCommunicator
from processes import free_port, run

pytestmark = pytest.mark.timeout(200)

RANKS = 2


def reference(
    predict: str, *, last_synchronous: bool = False, accumulate: bool = False, poison: int = -1, uneven: bool = False
) -> list[torch.Tensor]:
    """All ranks in one process, in plain torch; "exact": as if the prediction were the average itself."""
    model = net()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    history = owed = torch.zeros(1)
    flying: torch.Tensor | None = None
    weights = []
    for step in range(STEPS):
        total = torch.zeros(1)
        for rank in range(RANKS):
            if uneven and step >= STEPS - 2 * rank:
                continue
            value = loss(model, step, rank)
            if accumulate:
                value = value + loss(model, 100 + step, rank)
            total = total + flat(torch.autograd.grad(value, parameters))
        average = total / RANKS
        if step == poison:
            average = average * math.nan
        if flying is not None:
            if flying.isfinite().all():
                history, owed = flying, owed + flying
            flying = None
        if predict == "exact":
            given = average
        elif step < WARMUP or (last_synchronous and step == STEPS - 1):
            given, history, owed = owed + average, average, torch.zeros(1)
        else:
            guess = history if predict == "history" else torch.zeros_like(average)
            given, owed, flying = owed + guess, -guess, average
        for p, part in zip(parameters, torch.split(given, [p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
        weights.append(flat(parameters))
    return weights


def close(ours: list[list[float]], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "communicator"), [("gloo", None), ("mdas", None), ("gloo", "core")])
def test_training(backend: str, communicator: str | None) -> None:
    env = {"MDAS_MASTER_PORT": str(free_port())} if communicator == "core" else {}
    ours, theirs = (
        result.value for result in run(RANKS, ddp_ranks.scenes, backend, communicator, timeout=150, env=env)
    )
    for name in ("none", "history", "whole sketch", "sketch", "static", "last_synchronous", "accumulate", "poison"):
        assert ours[name] == theirs[name], f"{name}: the weights of the ranks have parted"
    close(ours["none"], reference("none"))
    close(ours["history"], reference("history"))
    close(ours["static"], reference("history"))
    close(ours["last_synchronous"], reference("history", last_synchronous=True))
    close(ours["accumulate"], reference("history", accumulate=True))
    close(ours["poison"], reference("history", poison=5))
    # An exact prediction leaves nothing to correct: that is synchronous training.
    close(ours["whole sketch"], reference("exact"))
    # It predicts better than the history does.
    exact = torch.stack(reference("exact"))
    off = {name: float((torch.tensor(ours[name]) - exact)[-1].norm()) for name in ("sketch", "history", "none")}
    assert 0 < off["sketch"] < 0.7 * off["history"], off
    check_debt(ours["debt"])
    assert "rank 0 has DDPState(predict='sketch', sketch_rank=4, " in ours["mismatch"]
    assert "but rank 1 has DDPState(predict='sketch', sketch_rank=5, " in theirs["mismatch"]


def check_debt(distances: list[float]) -> None:
    """What has been given is the sum of the averages, and the newest prediction beside it where that is delayed."""
    delayed = distances[WARMUP : STEPS - 1]
    assert all(distance < 1e-5 for distance in [*distances[:WARMUP], distances[-1]]), distances
    assert all(0.05 < distance < 5 for distance in delayed), distances


def test_uneven_batches_under_torchs_join() -> None:
    ours, theirs = (result.value for result in run(RANKS, ddp_ranks.uneven, timeout=90))
    # torch gives all ranks the weights of one that had data to the last.
    assert ours == theirs
    torch.testing.assert_close(torch.tensor(ours), reference("history", uneven=True)[-1], rtol=1e-4, atol=1e-5)


def test_a_lost_rank_is_told_by_backward() -> None:
    message = run(RANKS, ddp_ranks.killed, timeout=90)[0].value
    assert "a rank is gone, or has given up" in message


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_alone_trains_as_torch_does(alone: None) -> None:
    model, plain = DistributedDataParallel(net()), net()
    state = mdas.DDPState(model, warmup_steps=2)
    model.register_comm_hook(state, mdas.ddp_hook)
    for one in (model, plain):
        optimizer = sgd(one)
        for step in range(5):
            optimizer.zero_grad()
            loss(one, step, 0).backward()
            optimizer.step()
    assert torch.equal(flat(model.parameters()), flat(plain.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predict": "blend"}, r"predict='blend': behind a hook choose \"sketch\", \"history\" or \"none\""),
        ({"predict": "all"}, r"predict='all'"),
        ({"sketch_rank": 0}, r"sketch_rank=0: an int, at least 1"),
        ({"warmup_steps": 1}, r"warmup_steps=1: an int, at least 2"),
    ],
)
def test_options_that_make_no_sense(alone: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mdas.InvalidArgumentError, match=message):
        mdas.DDPState(DistributedDataParallel(net()), **options)


def test_misuse_is_explained(alone: None) -> None:
    with pytest.raises(TypeError, match="a DistributedDataParallel, not Sequential"):
        mdas.DDPState(net())  # type: ignore[arg-type]
    model = DistributedDataParallel(net())
    with pytest.raises(mdas.NotInitializedError, match=r"mdas\.init\(\)"):
        mdas.DDPState(model, communicator="core")
    with pytest.raises(mdas.InvalidArgumentError, match="rank 0 of 2, but the model's process group rank 0 of 1"):
        mdas.DDPState(model, communicator=_TwoRanks())


def test_a_static_graph_is_divided_anew_later(alone: None) -> None:
    with pytest.raises(mdas.InvalidArgumentError, match=r"at least 3, .* anew after 2 backward passes"):
        mdas.DDPState(DistributedDataParallel(net(), static_graph=True), warmup_steps=2)


def test_the_state_of_another_model_is_refused(alone: None) -> None:
    model, other = DistributedDataParallel(net()), DistributedDataParallel(net())
    model.register_comm_hook(mdas.DDPState(other), mdas.ddp_hook)
    with pytest.raises(RuntimeError, match="another model than the one that this DDPState was made for"):
        loss(model, 0, 0).backward()


class _TwoRanks(AloneCommunicator):
    size = 2
    ranks = (0, 1)
