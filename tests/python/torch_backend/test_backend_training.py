"""torch's own ways to train, over mdas and over Gloo: the same values."""

from __future__ import annotations

from typing import Any

import backend_training
import pytest
import torch

from processes import free_port, run

Values = list[list[dict[str, Any]]]
"""By rank, then by process group."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def two() -> Values:
    # mdas once more at the end: a process group can be made anew after it was destroyed.
    arguments = (free_port(), list(backend_training.SCENES), ["mdas", "gloo", "mdas"])
    return [result.value for result in run(2, backend_training.run_all, *arguments, timeout=350)]


@pytest.fixture(scope="module")
def four() -> Values:
    arguments = (free_port(), ["ddp", "fsdp", "zero"], ["mdas", "gloo"])
    return [result.value for result in run(4, backend_training.run_all, *arguments, timeout=350)]


@pytest.mark.parametrize("scene", backend_training.SCENES)
def test_two_ranks_equal_gloo_bit_for_bit(scene: str, two: Values) -> None:
    for ours, gloo, _ in two:
        assert ours[scene]["bits"] == gloo[scene]["bits"]


@pytest.mark.parametrize("scene", ["ddp", "fsdp", "zero"])
def test_four_ranks_equal_gloo_to_rounding(scene: str, four: Values) -> None:
    for ours, gloo in four:
        torch.testing.assert_close(
            torch.tensor(ours[scene]["values"]), torch.tensor(gloo[scene]["values"]), rtol=1e-4, atol=1e-5
        )


def test_a_process_group_can_be_made_anew(two: Values) -> None:
    for first, _, again in two:
        assert again["ddp"]["bits"] == first["ddp"]["bits"]


def test_sync_batch_norm_is_refused_by_torch_itself(two: Values) -> None:
    assert "GPU" in two[0][0]["sync_batch_norm"]["bits"]
