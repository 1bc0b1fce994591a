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
from mdas.errors import InvalidArgumentError
from mdas.optimizer.buckets import Layout, Place, Vector
from mdas.optimizer.shards import sharded
from mdas.optimizer.update import Change, Clip, GenericUpdate, Update

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

    def steps(self, state: State) -> int:
        """Updates made so far, or, where torch does not count them, whether there were any."""
        ...

    def counter(self, state: State) -> Tensor | None:
        """The count that torch keeps of updates, to be advanced; None where it keeps none."""
        ...

    def rule(self, group: Group, steps: int) -> Any:
        """The kernel's rule for the update after `steps` updates."""
        ...


class _Sgd:
    def supports(self, group: Group) -> bool:
        return not group["differentiable"]

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def steps(self, state: State) -> int:
        return int(state.get("momentum_buffer") is not None)

    def counter(self, state: State) -> Tensor | None:
        return None

    def rule(self, group: Group, steps: int) -> Any:
        return _core.Sgd(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            first=steps == 0,
        )


class _Adam:
    def supports(self, group: Group) -> bool:
        return not (group["amsgrad"] or group["capturable"] or group["differentiable"])

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def steps(self, state: State) -> int:
        return int(state["step"]) if "step" in state else 0

    def counter(self, state: State) -> Tensor | None:
        counter: Tensor = state.setdefault("step", torch.tensor(0.0))
        return counter

    def rule(self, group: Group, steps: int) -> Any:
        beta1, beta2 = group["betas"]
        return _core.Adam(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            step=steps + 1,
            maximize=group["maximize"],
        )


# By exact type: a subclass may do something else.
_FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    torch.optim.SGD: _Sgd(),
    torch.optim.Adam: _Adam(),
    torch.optim.AdamW: _Adam(),
}


def choose_update(inner: torch.optim.Optimizer, layout: Layout, clip: Clip, ranks: int, fused: bool | None) -> Update:
    """The fused update where it fits, if it is not ruled out.

    Raises InvalidArgumentError if it is asked for and does not fit.
    """
    obstacle = why_not_fused(inner, layout)
    if clip.value is not None:
        obstacle = "it cannot clip by value (max_value)"
    if fused and obstacle is not None:
        raise InvalidArgumentError(f"fused=True: {obstacle}")
    # One rank by itself is to give exactly what torch gives.
    wanted = fused if fused is not None else ranks > 1
    return FusedUpdate(inner, layout) if wanted and obstacle is None else GenericUpdate(inner, layout)


def why_not_fused(inner: torch.optim.Optimizer, layout: Layout) -> str | None:
    """None if FusedUpdate fits; else what stands against it."""
    family = _FAMILIES.get(type(inner))
    if family is None:
        return f"there is no fused kernel for {type(inner).__name__}"
    if not all(family.supports(group) for group in inner.param_groups):
        return "there is no fused kernel with amsgrad, capturable or differentiable"
    for place in layout.places:
        p = place.parameter
        if sharded(p):
            return f"parameter {place.name!r} is divided among ranks (DTensor)"
        if p.dtype != torch.float32 or not p.is_contiguous() or p.device.type != "cpu":
            return f"parameter {place.name!r} is not contiguous float32 in CPU memory"
    return None


class FusedUpdate:
    """SGD, Adam and AdamW on contiguous float32 parameters: equal to torch's to rounding.

    `inner.step()` is not called: hooks registered on the wrapped optimizer do not run.
    """

    name = "fused"

    def __init__(self, inner: torch.optim.Optimizer, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        self._family = _FAMILIES[type(inner)]

    def run(
        self,
        base: Vector | None,
        real: Change | None,
        forward: Sequence[Tensor] | None = None,
        prediction: Change | None = None,
    ) -> None:
        weights: Sequence[Tensor] = self._layout.parameters if base is None else base.views
        plan = _Plan(self._family, self._inner.param_groups)
        counters: list[Tensor] = []
        complete = None if prediction is None else prediction.complete
        bucket = -1
        for i, place in enumerate(self._layout.places):
            if complete is not None and place.bucket != bucket:
                bucket = place.bucket
                complete(bucket)
            parameter = place.parameter
            at = _address(weights[i], place)
            ahead = None if forward is None else _address(forward[i], place)
            state = self._inner.state.get(parameter, {})
            steps = self._family.steps(state)
            first, names = plan.update(place, real, steps)
            second, later_names = plan.update(place, prediction, steps + (first is not None))
            if first is not None:
                state = self._inner.state[parameter]
                counter = self._family.counter(state)
                if counter is not None:
                    counters.append(counter)
                if second is not None and names != later_names:
                    # Momentum was switched on or off between the two: these are two kernels.
                    _run(place, at, _tensors(state, names, parameter), first, None, None)
                    first = None
            if first is None:
                state, names = dict(state), later_names
            _run(place, at, _tensors(state, names, parameter), first, ahead, second)
        if counters:
            torch._foreach_add_(counters, 1.0)
        if base is None or forward is self._layout.parameters:
            torch.autograd.graph.increment_version(self._layout.parameters)


class _Plan:
    """Rules for this call, one per group, step count and change."""

    def __init__(self, family: Family, groups: Sequence[Group]) -> None:
        self._family = family
        self._groups = groups
        self._group_of = {p: k for k, group in enumerate(groups) for p in group["params"]}
        self._rules: dict[tuple[int, int, int], tuple[Any, tuple[str, ...]]] = {}

    def update(self, place: Place, change: Change | None, steps: int) -> tuple[Any, tuple[str, ...]]:
        """The change of this parameter, for the kernel, and which state it needs; (None, ()) if none."""
        if change is None or not change.used[place.index]:
            return None, ()
        k = self._group_of[place.parameter]
        key = (k, steps, id(change))
        if key not in self._rules:
            group = self._groups[k] if change.hyper is None else change.hyper[k]
            self._rules[key] = self._family.rule(group, steps), self._family.names(group)
        rule, names = self._rules[key]
        shared = change.shared.views[place.index].data_ptr()
        local = None if change.local is None else change.local.views[place.index].data_ptr()
        return _core.Update(rule, shared, local, change.alpha, change.scale), names


def _run(place: Place, at: int, state: list[Tensor], real: Any, forward: int | None, prediction: Any) -> None:
    addresses = [tensor.data_ptr() for tensor in state]
    _core.fused_update(place.parameter.numel(), at, addresses, real, forward, prediction)


def _tensors(state: State, names: Sequence[str], parameter: Tensor) -> list[Tensor]:
    """The state that the kernel moves; made where there is none, as torch would."""
    tensors = []
    for name in names:
        tensor = state.get(name)
        if tensor is None:
            tensor = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        elif tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = tensor.float().contiguous()
        state[name] = tensor
        tensors.append(tensor)
    return tensors


def _address(tensor: Tensor, place: Place) -> int:
    """Of the memory, after making sure that it still is what the kernel will take it for."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.shape != place.shape:
        raise InvalidArgumentError(
            f"parameter {place.name!r} has become {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: wrap the optimizer after changing the model"
        )
    return tensor.data_ptr()
