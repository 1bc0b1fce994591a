"""Base weights in the module, for everything that must not see predicted ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.hooks import Collector
from mdas.optimizer.pipeline import Pipeline
from mdas.optimizer.shards import like, sharded
from mdas.optimizer.update import weights_in

logger = logging.getLogger("mdas.optimizer")

_BACKWARD = (
    "backward() while the module holds base weights: gradients for training are taken at the forward "
    "weights. Leave base_weights(), or use torch.autograd.grad, which does not touch param.grad."
)


class BaseWeights:
    """Lends the module its base weights, with the pending average applied.

    Computed once per step, when first asked for; in memory of their own, so that what a caller keeps
    (a state_dict, say) stays as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        collector: Collector,
        pipeline: Pipeline,
    ) -> None:
        self._module = module
        self._layout = layout
        self._collector = collector
        self._pipeline = pipeline
        self._weights: Vector | None = None
        self._known = False
        self._lent = False
        self._warned = False
        self._forwards: list[Any] = []
        self._before: list[Tensor] | None = None
        self._handles = [
            module.register_forward_pre_hook(_Hook(self._before_forward), prepend=True),
            module.register_forward_hook(_Hook(self._after_forward), always_call=True),
            module.register_state_dict_post_hook(_Hook(self._replace)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_Hook(self._before_load)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(_Hook(self._after_load)),  # type: ignore[no-untyped-call]
        ]

    @property
    def lent(self) -> bool:
        """Does the module hold base weights at the moment?"""
        return self._lent

    def forget(self) -> None:
        """A step has been made: what was computed is outdated."""
        self._weights, self._known = None, False

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def lend(self) -> Iterator[None]:
        """The module holds base weights; inner uses change nothing."""
        weights = None if self._lent else self._get()
        if weights is None:
            yield
            return
        self._lent = True
        try:
            with weights_in(self._layout, weights.views), self._collector.refuse(_BACKWARD):
                yield
        finally:
            self._lent = False
            if torch.is_grad_enabled():
                # A graph built on base weights must not meet the forward weights in its backward
                # pass: autograd's own check for changed weights then says so.
                torch.autograd.graph.increment_version(self._layout.parameters)

    def _get(self) -> Vector | None:
        if not self._known:
            # Inference tensors would be of no use to whoever reads these weights later.
            with torch.inference_mode(False), torch.no_grad():
                self._weights = self._pipeline.preview()
            self._known = True
        return self._weights

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._forwards.append(None)
        else:
            self._lend_to_forward()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        lending = self._forwards.pop()
        if lending is not None:
            self._take_back(lending)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled module's hooks are compiled with it
    def _lend_to_forward(self) -> None:
        lending = self.lend()
        # Before anything can fail: _after_forward is called even then.
        self._forwards.append(lending)
        lending.__enter__()
        if self._lent and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            logger.warning(
                "a forward pass in evaluation mode sees the base weights; it was made with gradients enabled, and "
                "backward() from it will fail. Evaluate under torch.no_grad(). To train layers in evaluation mode, "
                "leave the module itself in training mode and call eval() on its submodules."
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_back(self, lending: AbstractContextManager[None]) -> None:
        lending.__exit__(None, None, None)

    def _replace(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """state_dict(): base weights instead of forward weights."""
        if self._lent:
            return
        weights = self._get()
        if weights is None:
            return
        views = {id(place.parameter): weights.views[place.index] for place in self._layout.places}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key, view = prefix + name, views.get(id(parameter))
            if view is not None and key in state:
                kept_vars = isinstance(state[key], nn.Parameter)
                # torch.save cannot take several DTensors whose parts lie in one storage, as these views do.
                value = like(view.clone() if sharded(parameter) else view, parameter)
                state[key] = nn.Parameter(value, parameter.requires_grad) if kept_vars else value

    @torch.no_grad()
    def _before_load(self, *args: Any) -> None:
        """load_state_dict(): what is loaded are base weights, and so is what is left as it was."""
        weights = None if self._lent else self._get()
        if weights is not None:
            self._before = [p.detach().clone() for p in self._layout.parameters]
            torch._foreach_copy_(self._layout.parameters, weights.views)

    @torch.no_grad()
    def _after_load(self, *args: Any) -> None:
        """New weights restart the delay: an average in flight belongs to the old ones. The base weights
        themselves (a checkpoint of this very step) change nothing.
        """
        before, self._before = self._before, None
        if before is None:
            return
        weights = self._get()
        assert weights is not None
        parameters = self._layout.parameters
        if all(torch.equal(p, view) for p, view in zip(parameters, weights.views, strict=True)):
            torch._foreach_copy_(parameters, before)
        else:
            self._pipeline.restart()
            self.forget()


class _Hook:
    """A hook that stays behind when the module is copied or pickled: the copy is nobody's to train."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _get_nothing, ()


def _nothing(*args: Any) -> None:
    pass


def _get_nothing() -> Callable[..., None]:
    return _nothing
