"""Update and prediction in one pass over memory, by kernels of the core.

State stays where torch's own optimizers keep it, under the same names and in the same form, so that
`state_dict()` of the wrapped optimizer can be loaded without mdas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mdas import _core
from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.update import Change

Group = dict[str, Any]
State = dict[str, Any]


class Family(Protocol):
    """A kind of torch optimizer that has a kernel."""

    def supports(self, group: Group) -> bool:
        """Can the kernel do what this parameter group asks for?"""
        ...

    def names(self, group: Group) -> tuple[str, ...]:
        """Of the state tensors that are shaped like the parameter."""
        ...

    def rule(self, group: Group, steps: float | None) -> Any:
        """For the next update, `steps` updates having been made (None: there is no state yet)."""
        ...


class _Sgd:
    def supports(self, group: Group) -> bool:
        return not group["differentiable"]

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def rule(self, group: Group, steps: float | None) -> Any:
        return _core.Sgd(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            first=steps is None,
        )


class _Adam:
    def supports(self, group: Group) -> bool:
        return not (group["amsgrad"] or group["capturable"] or group["differentiable"])

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def rule(self, group: Group, steps: float | None) -> Any:
        beta1, beta2 = group["betas"]
        return _core.Adam(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            step=int(steps or 0) + 1,
            maximize=group["maximize"],
        )


# By exact type: a subclass may do something else.
FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    torch.optim.SGD: _Sgd(),
    torch.optim.Adam: _Adam(),
    torch.optim.AdamW: _Adam(),
}


def why_not_fused(inner: torch.optim.Optimizer, layout: Layout) -> str | None:
    """None if FusedUpdate fits; else what stands against it."""
    family = FAMILIES.get(type(inner))
    if family is None:
        return f"there is no fused kernel for {type(inner).__name__}"
    if not all(family.supports(group) for group in inner.param_groups):
        return "amsgrad, capturable and differentiable have no fused kernel"
    for place in layout.places:
        p = place.parameter
        if p.dtype != torch.float32 or not p.is_contiguous():
            return f"parameter {place.name!r} is not contiguous float32"
    return None


class FusedUpdate:
    """SGD, Adam and AdamW on contiguous float32 parameters: equal to torch's to rounding.

    `inner.step()` is not called: hooks registered on the wrapped optimizer do not run.
    """

    name = "fused"

    def __init__(self, inner: torch.optim.Optimizer, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        self._family = FAMILIES[type(inner)]

    def run(
        self,
        base: Vector | None,
        real: Change | None,
        forward: Sequence[Tensor] | None = None,
        prediction: Change | None = None,
    ) -> None:
        groups = self._inner.param_groups
        group_of = {p: k for k, group in enumerate(groups) for p in group["params"]}
        weights: Sequence[Tensor] = self._layout.parameters if base is None else base.views
        rules = _Rules(self._family)
        advanced: list[Tensor] = []
        for i, (place, weight) in enumerate(zip(self._layout.places, weights, strict=True)):
            parameter = place.parameter
            k, count = group_of[parameter], parameter.numel()
            at = _address(weight, count, place.name)
            ahead = None if forward is None else _address(forward[i], count, place.name)
            state = self._inner.state.get(parameter, {})
            steps = self._family.steps(state)
            first = second = None
            if real is not None and real.used[i]:
                group = groups[k] if real.hyper is None else real.hyper[k]
                names = self._family.names(group)
                first = _update(rules.get(k, real, group, steps), real, i)
                state = self._inner.state[parameter]
                addresses = self._state(state, names, place.name, parameter)
                if (counter := self._family.counter(state)) is not None:
                    advanced.append(counter)
                steps = (steps or 0.0) + 1.0
            if prediction is not None and prediction.used[i]:
                group = groups[k] if prediction.hyper is None else prediction.hyper[k]
                names = self._family.names(group)
                second = _update(rules.get(k, prediction, group, steps), prediction, i)
                addresses = self._state(state, names, place.name, parameter)
            if first is None and second is None:
                addresses = []
            _core.fused_update(count, at, addresses, first, ahead, second)
        if advanced:
            torch._foreach_add_(advanced, 1.0)
        if base is None or forward is self._layout.parameters:
            torch.autograd.graph.increment_version(self._layout.parameters)
