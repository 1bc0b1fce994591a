"""U: one step of the user's optimizer, for good or only to look at the weights it would give."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.shards import like, local, put

Hyper = list[dict[str, Any]]
"""One dictionary per parameter group: all but its parameters."""


def snapshot(groups: Sequence[dict[str, Any]]) -> Hyper:
    """The hyper-parameters as they are now."""
    return [{k: _clone(v) for k, v in group.items() if k != "params"} for group in groups]


@dataclass(frozen=True, slots=True)
class Clip:
    """How an averaged gradient is clipped before it is applied; None: not."""

    norm: float | None = None
    """To this 2-norm, over all parameters."""
    value: float | None = None
    """Every element to [-value, value]."""


@dataclass(slots=True)
class Change:
    """A gradient to make an update with: scale * (shared + (1 - alpha) (local - shared)), clipped to `limit`."""

    shared: Vector
    used: Sequence[bool]
    """Parameters without a gradient do not move."""
    local: Vector | None = None
    """None: the gradient is `shared`."""
    alpha: float = 1.0
    scale: float = 1.0
    limit: float | None = None
    """Every element is clipped to [-limit, limit]; needs the generic update."""
    hyper: Hyper | None = None
    """Hyper-parameters to apply; None: the groups as they are."""
    complete: Callable[[int], None] | None = None
    """To be called before bucket k of `shared`, or what `used` says of its parameters, is read: it may still be on its
    way. None: all of it is there. Buckets are completed in order, each as late as possible."""


class Update(Protocol):
    """U(weights, state, gradient) of a torch optimizer."""

    name: str

    def run(
        self,
        base: Vector | None,
        real: Change | None,
        forward: Sequence[Tensor] | None = None,
        prediction: Change | None = None,
    ) -> None:
        """Moves weights and optimizer state by `real`, if there is one; then writes to `forward`
        the weights that a second update by `prediction` would give (without one: the base weights),
        which leaves no trace in the state.

        `base`: the weights; None: the parameters themselves. `forward`: one tensor per parameter of
        the layout, possibly the parameters.
        """
        ...


class GenericUpdate:
    """Any optimizer whose `step()` needs no closure: bit for bit what it does by itself.

    It runs on the base weights with the averaged gradient in `param.grad`; for a prediction, on a
    copy of weights and state that is thrown away.
    """

    name = "generic"

    def __init__(self, inner: torch.optim.Optimizer, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        self._gradient = layout.vector()

    def run(
        self,
        base: Vector | None,
        real: Change | None,
        forward: Sequence[Tensor] | None = None,
        prediction: Change | None = None,
    ) -> None:
        weights: Sequence[Tensor] = self._layout.parameters if base is None else base.views
        if real is not None:
            self._step(weights, real)
        if forward is None:
            return
        torch._foreach_copy_(list(forward), [w.detach() for w in weights])
        if prediction is not None:
            if prediction.complete is not None:
                prediction.complete(len(self._gradient.flats) - 1)
            with self._trial():
                self._step(forward, prediction)

    def _step(self, weights: Sequence[Tensor], change: Change) -> None:
        with ExitStack() as stack:
            if weights is not self._layout.parameters:
                stack.enter_context(weights_in(self._layout, weights))
            stack.enter_context(self._gradients(change))
            if change.hyper is not None:
                stack.enter_context(self._hyper(change.hyper))
            self._inner.step()

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """State and groups are afterwards what they were before."""
        inner = self._inner
        state, groups = inner.state, [dict(group) for group in inner.param_groups]
        inner.state = defaultdict(dict, {p: _clone(values) for p, values in state.items()})
        try:
            yield
        finally:
            inner.state = state
            for group, before in zip(inner.param_groups, groups, strict=True):
                group.clear()
                group.update(before)

    @contextmanager
    def _gradients(self, change: Change) -> Iterator[None]:
        """`param.grad` is memory of our own: an optimizer may change it in place."""
        own = self._gradient
        if change.local is None:
            own.copy_(change.shared)
        else:
            for out, c, g in zip(own.flats, change.shared.flats, change.local.flats, strict=True):
                torch.lerp(g, c, change.alpha, out=out)
        if change.scale != 1.0:
            torch._foreach_mul_(own.flats, change.scale)
        if change.limit is not None:
            for flat in own.flats:
                flat.clamp_(-change.limit, change.limit)
        parameters = [place.parameter for place in self._layout.places]
        theirs = [p.grad for p in parameters]
        for p, view, is_used in zip(parameters, own.views, change.used, strict=True):
            p.grad = like(view, p) if is_used else None
        try:
            yield
        finally:
            for p, grad in zip(parameters, theirs, strict=True):
                p.grad = grad

    @contextmanager
    def _hyper(self, hyper: Hyper) -> Iterator[None]:
        """The groups hold `hyper`; what the step itself changes in them (some optimizers keep
        their state there) stays.
        """
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
def weights_in(layout: Layout, weights: Sequence[Tensor]) -> Iterator[None]:
    """The parameters lie in the memory of `weights` for a while."""
    parameters = [place.parameter for place in layout.places]
    theirs = [local(p).data for p in parameters]
    for p, view in zip(parameters, weights, strict=True):
        put(p, view)
    try:
        yield
    finally:
        for p, data in zip(parameters, theirs, strict=True):
            put(p, data)


def _clone(value: Any) -> Any:
    """A deep copy. Cheaper than copy.deepcopy for what optimizers keep."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _clone(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_clone(v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return copy.deepcopy(value)
