"""Loss scaling for float16: `torch.amp.GradScaler`, with the same judgement on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mdas.optimizer.distributed import DistributedOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a `DistributedOptimizer`; with any other optimizer it is that.

    An overflow is what the average shows, so that all ranks skip the same steps, and scales and counters
    stay equal. Under the delayed schedule an average, and so its overflow, is known one step later; every
    average is applied with the scale that its gradients were taken with.

    `unscale_` is refused: the gradients in `param.grad` are on their way already. Clip with
    `DistributedOptimizer(..., max_norm=...)`, which clips the unscaled average.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """One step of the optimizer. Its update is skipped, on all ranks, if the average is not finite."""
        if not (self.is_enabled() and isinstance(optimizer, DistributedOptimizer)):
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise RuntimeError("GradScaler.step(): a closure is not supported while scaling is enabled")
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        optimizer._scaled_step(self)
        assert self._scale is not None
        overflow = torch.full((), float(optimizer._pipeline.overflowed), device=self._scale.device)
        state["found_inf_per_device"] = {self._scale.device: overflow}
        state["stage"] = OptState.STEPPED
        return None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Refused for a `DistributedOptimizer`, with RuntimeError."""
        if self.is_enabled() and isinstance(optimizer, DistributedOptimizer):
            raise RuntimeError(
                "GradScaler.unscale_(): the exchange of the gradients has started during backward(): what is done to "
                "param.grad now has no effect. To clip, pass max_norm= to DistributedOptimizer, and call neither "
                "unscale_() nor torch.nn.utils.clip_grad_norm_()"
            )
        super().unscale_(optimizer)
