"""A checkpoint that one rank alone has read, in processes of one world."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import processes


class OfAScript:
    """What `torch.load(weights_only=True)` does not know."""


def sending() -> dict[str, Any]:
    import torch

    import mdas

    mdas.init(timeout=20)
    rank = mdas.rank()
    tensor = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t()
    state = {"tensor": tensor, "half": torch.ones(2, dtype=torch.bfloat16), "none": [None, (1, "ü")], "empty": {}}
    received = mdas.broadcast_state(state if rank == 1 else None, 1)
    assert received["tensor"] is not tensor and torch.equal(received["tensor"], tensor)
    assert received["tensor"].dtype == torch.float64 and received["half"].dtype == torch.bfloat16
    assert (received["none"], received["empty"]) == ([None, (1, "ü")], {})

    seen: dict[str, Any] = {}
    for name, bad in [("class", OfAScript()), ("lock", threading.Lock()), ("function", lambda: None)]:
        with pytest.raises(TypeError) as caught:
            mdas.broadcast_state({"bad": bad} if rank == 0 else None)
        seen[name] = str(caught.value)
    part = mdas.new_group([0, 2])
    if rank != 1:
        seen["part"] = mdas.broadcast_state({"of": rank}, 1, group=part)
    return seen


@pytest.mark.timeout(90)
def test_what_is_sent_and_what_is_refused() -> None:
    results = processes.run(3, sending, timeout=60)
    assert [result.returncode for result in results] == [0, 0, 0], results[0].stderr
    first, second, third = [result.value for result in results]
    assert first.pop("part") == third.pop("part") == {"of": 2}
    assert first == second == third
    assert "OfAScript" in first["class"] and "lock" in first["lock"] and "lambda" in first["function"]
    assert all("torch.load(weights_only=True) does not read" in words for words in first.values())


def resuming(folder: str) -> list[float]:
    """The weights after six steps; with a stop after three, if there is no file yet."""
    import torch

    import mdas

    mdas.init(timeout=20)
    rank, file = mdas.rank(), Path(folder) / "checkpoint.pt"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = mdas.DistributedOptimizer(inner, model, warmup_steps=1)

    def steps(numbers: range) -> None:
        for step in numbers:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    if not file.exists():
        mdas.barrier()  # all have looked
        steps(range(3))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        if rank == 0:
            torch.save(saved, file)
    else:
        state = mdas.broadcast_state(torch.load(file, weights_only=True) if rank == 0 else None)
        assert state["step"] == 3
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    steps(range(3, 6))
    with optimizer.base_weights():
        return [float(x) for p in model.parameters() for x in p.detach().reshape(-1)]


@pytest.mark.timeout(120)
def test_training_goes_on_from_a_file_that_rank_0_alone_has_read(tmp_path: Path) -> None:
    """With a gradient in flight, bit for bit as if it had not stopped."""
    whole = processes.run(2, resuming, str(tmp_path), timeout=50)
    again = processes.run(2, resuming, str(tmp_path), timeout=50)
    assert [result.returncode for result in whole + again] == [0] * 4, (whole[0].stderr, again[0].stderr)
    assert [result.value for result in again] == [whole[0].value] * 2
    assert whole[1].value == whole[0].value
