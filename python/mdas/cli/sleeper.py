"""A model that has gradients, and an accelerator that is elsewhere: its passes sleep."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn


class Sleeper(nn.Module):
    """`layers` square float32 matrices of `mb` MiB in all.

    A forward pass sleeps a third of `compute` seconds, a backward pass the rest, spread evenly over the
    layers, whose gradients appear one after the other, the last layer's first.
    """

    def __init__(self, mb: float, layers: int, compute: float) -> None:
        super().__init__()
        side = max(1, round(math.sqrt(mb * 2**20 / 4 / layers)))
        self.weights = nn.ParameterList(torch.zeros(side, side) for _ in range(layers))
        generator = torch.Generator().manual_seed(0)
        self._gradients = [torch.randn(side, side, generator=generator) for _ in range(layers)]
        self._pause = compute / 3 / layers

    def forward(self) -> torch.Tensor:
        """A scalar; its backward pass yields the same gradients every time."""
        carry = torch.zeros(())
        for weight, gradient in zip(self.weights, self._gradients, strict=True):
            carry = _Layer.apply(carry, weight, gradient, self._pause)
        return carry


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, pause: float) -> Any:
        time.sleep(pause)
        ctx.gradient, ctx.pause = gradient, pause
        return carry + 0

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        time.sleep(2 * ctx.pause)
        return outer[0], ctx.gradient, None, None
