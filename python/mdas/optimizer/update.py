"""U: one step of the user's optimizer, for good or only to look at the weights it would give."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from mdas.optimizer.buckets import Layout, Vector

Hyper = list[dict[str, Any]]
"""One dictionary per parameter group: all but its parameters."""


def snapshot(groups: Sequence[dict[str, Any]]) -> Hyper:
    """The hyper-parameters as they are now."""
    return [{k: _clone(v) for k, v in group.items() if k != "params"} for group in groups]


class Update(Protocol):
    """U(weights, state, gradient) of a torch optimizer.

    `gradient` is multiplied by `scale` (clipping); parameters that are not `used` do not move;
    `hyper` None stands for the groups as they are.
    """

    name: str

    def step(
        self, weights: Vector | None, gradient: Vector, scale: float, used: Sequence[bool], hyper: Hyper | None
    ) -> None:
        """Moves the weights (None: the parameters themselves) and the optimizer's state."""
        ...

    def preview(
        self,
        weights: Vector,
        gradient: Vector,
        scale: float,
        used: Sequence[bool],
        hyper: Hyper | None,
        into: Vector | None,
    ) -> None:
        """Writes the weights that `step` would give to `into` (None: to the parameters);
        changes neither `weights` nor the optimizer's state."""
        ...


class GenericUpdate:
    """Any optimizer whose `step()` needs no closure: bit for bit what it does by itself.

    It runs on the base weights with the averaged gradient in `param.grad`; for a preview, on a copy
    of weights and state that is thrown away.
    """

    name = "generic"

    def __init__(self, inner: torch.optim.Optimizer, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        self._gradient = layout.vector()

    def step(
        self, weights: Vector | None, gradient: Vector, scale: float, used: Sequence[bool], hyper: Hyper | None
    ) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._gradients(gradient, scale, used))
            if weights is not None:
                stack.enter_context(weights_in(self._layout, weights))
            if hyper is not None:
                stack.enter_context(self._hyper(hyper))
            self._inner.step()

    def preview(
        self,
        weights: Vector,
        gradient: Vector,
        scale: float,
        used: Sequence[bool],
        hyper: Hyper | None,
        into: Vector | None,
    ) -> None:
        if into is None:
            self._layout.load(weights)
        else:
            into.copy_(weights)
        inner = self._inner
        state, groups = inner.state, [dict(group) for group in inner.param_groups]
        inner.state = defaultdict(dict, {p: _clone(values) for p, values in state.items()})
        try:
            self.step(into, gradient, scale, used, hyper)
        finally:
            inner.state = state
            for group, before in zip(inner.param_groups, groups, strict=True):
                group.clear()
                group.update(before)

    @contextmanager
    def _gradients(self, gradient: Vector, scale: float, used: Sequence[bool]) -> Iterator[None]:
        """`param.grad` is a copy of the gradient: an optimizer may change it in place."""
        torch._foreach_copy_(self._gradient.flats, gradient.flats)
        if scale != 1.0:
            torch._foreach_mul_(self._gradient.flats, scale)
        parameters = self._layout.parameters
        theirs = [p.grad for p in parameters]
        for p, view, is_used in zip(parameters, self._gradient.views, used, strict=True):
            p.grad = view if is_used else None
        try:
            yield
        finally:
            for p, grad in zip(parameters, theirs, strict=True):
                p.grad = grad

    @contextmanager
    def _hyper(self, hyper: Hyper) -> Iterator[None]:
        """The groups hold `hyper`; what the step itself changes in them (some optimizers keep
        their state there) stays."""
        groups = self._inner.param_groups
        now = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for group, values in zip(groups, hyper, strict=True):
            group.update(values)
        try:
            yield
        finally:
            for group, values, current in zip(groups, hyper, now, strict=True):
                changed = {k: group[k] for k, v in values.items() if group[k] is not v}
                group.update(current)
                group.update(changed)


@contextmanager
def weights_in(layout: Layout, weights: Vector) -> Iterator[None]:
    """The parameters lie in the memory of `weights` for a while."""
    theirs = [p.data for p in layout.parameters]
    for p, view in zip(layout.parameters, weights.views, strict=True):
        p.data = view
    try:
        yield
    finally:
        for p, data in zip(layout.parameters, theirs, strict=True):
            p.data = data


def _clone(value: Any) -> Any:
    """A deep copy. Cheaper than copy.deepcopy for what optimizers keep."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _clone(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_clone(v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return copy.deepcopy(value)
