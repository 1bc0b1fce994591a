"""Two optimizers in one loop, of ranks that run out of data one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workers import batch, inner, report, small_net

from processes import run

BATCHES = (2, 7, 4)
"""Of each rank."""


def joined(over_torch: bool) -> dict[str, Any]:
    import mdas

    if over_torch:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    else:
        mdas.init(timeout=60)
        rank = mdas.rank()
    critic, actor = small_net(), small_net()
    options: dict[str, Any] = {"warmup_steps": 1, "bucket_mb": 0.004, "communicator": "torch" if over_torch else None}
    often = mdas.DistributedOptimizer(inner(critic, "momentum"), critic, **options)
    seldom = mdas.DistributedOptimizer(inner(actor, "momentum"), actor, **options)
    with mdas.join():
        for step in range(BATCHES[rank]):
            x, y = batch(step, rank)
            often.zero_grad()
            nn.functional.cross_entropy(critic(x), y).backward()
            often.step()
            if step % 3 == 2:  # rank 0 never comes here
                seldom.zero_grad()
                nn.functional.mse_loss(actor(x), critic(x).detach()).backward()
                seldom.step()
    with often.base_weights(), seldom.base_weights():
        return {"critic": report(critic)["bits"], "actor": report(actor)["bits"]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("over_torch", [False, True], ids=["core", "torch"])
def test_each_at_its_own_pace(over_torch: bool) -> None:
    results = run(len(BATCHES), joined, over_torch, timeout=150)
    assert [result.returncode for result in results] == [0] * len(BATCHES), [result.stderr for result in results]
    first, *others = [result.value for result in results]
    assert others == [first] * 2
    assert first["critic"] != first["actor"]
    untrained = report(small_net())["bits"]
    assert untrained not in first.values()
