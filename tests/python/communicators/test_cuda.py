"""Parameters in CUDA memory. Two processes share a GPU over Gloo, which NCCL would refuse."""

from __future__ import annotations

import pytest
import torch
from torch_ranks import CASES, net, on_cuda, one_on_nccl, sgd, train

from processes import run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: this checks what happens on one"
)


def test_two_ranks_train_as_on_the_cpu() -> None:
    ranks = [result.value for result in run(2, on_cuda, timeout=150)]
    for name in CASES:
        assert ranks[0]["cuda"][name]["base"]["bits"] == ranks[1]["cuda"][name]["base"]["bits"], name
        rtol, atol = (0.05, 0.02) if name == "bfloat16" else (1e-2, 1e-3)
        for rank in range(2):
            for what in ("forward", "base", "buffers"):
                ours, theirs = (torch.tensor(ranks[rank][kind][name][what]["values"]) for kind in ("cuda", "cpu"))
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_nccl_alone_equals_torch() -> None:
    (result,) = run(1, one_on_nccl, timeout=90)
    plain = net()
    train(sgd(plain), plain, range(3), 0)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(torch.tensor(result.value), expected, rtol=1e-3, atol=1e-4)
