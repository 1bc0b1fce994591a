"""A communication hook for DistributedDataParallel: the delay with prediction, in front of the user's own optimizer.

A hook can replace a gradient, but neither look at the optimizer nor take a step back: see `corrected`.
"""

# Without `from __future__ import annotations`: torch compares the hook's annotations with types.
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mdas.communicator import Communicator, TorchCommunicator, Work, tags
from mdas.communicator.choice import choose
from mdas.errors import InvalidArgumentError
from mdas.optimizer.agreement import require_agreement
from mdas.optimizer.buckets import Layout
from mdas.optimizer.corrected import Corrected
from mdas.optimizer.predict import PREDICTIONS


def _least_warmup(model: DistributedDataParallel) -> int:
    """DistributedDataParallel divides the parameters anew after the first backward pass; where it first learns the
    graph, after the second.
    """
    return 3 if model.static_graph else 2


@dataclass(slots=True)
class _Bucket:
    """One of this backward pass's buckets."""

    buffer: Tensor
    gradients: list[Tensor]
    """Views of the buffer, one per parameter."""
    parameters: list[Tensor]
    future: Future[Tensor]
    """Tells DistributedDataParallel that the buffer holds what the optimizer is to see."""


class DDPState:
    """What `ddp_hook` keeps from one backward pass to the next. One per model; all ranks make it alike.

        model = DistributedDataParallel(model)
        model.register_comm_hook(mdas.DDPState(model), mdas.ddp_hook)

    Weights stay the same bits on all ranks, and are one *predicted* update ahead at any time. To have the exact sum of
    all averages in the weights, for a checkpoint or at the end, set `delayed = False` before a backward pass, on all
    ranks: that pass waits for its average, and makes up for everything before it.

    See docs/migrating.md for what the mechanism cannot do. Memory, in copies of the parameters: 6, one more with a
    sketch.

    Args:
        model: the model whose hook it is for.
        predict: "sketch" (default), "history" or "none" (see `mdas.optimizer.predict`): the predictions that all
            ranks share, since nothing ever brings weights together again that have parted.
        sketch_rank: rank of the sketch; its traffic is proportional.
        warmup_steps: synchronous backward passes at the start; at least 2 (3 with `static_graph=True`), since the
            division into buckets is not known before.
        communicator: what to exchange through. None: the ranks and the backend of the model's process group, in three
            groups of their own. "core": mdas's own engine, after `mdas.init()`, of the same ranks. Or a communicator.

    Raises:
        MismatchError: on every rank, if options differ.
        InvalidArgumentError: an option makes no sense, or the communicator has other ranks than the model.
        TypeError: the model is no DistributedDataParallel.
        NotInitializedError: "core" without `mdas.init()`.
        PeerLostError, CollectiveTimeoutError: a rank left meanwhile, or did not come.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        predict: Literal["sketch", "history", "none"] = "sketch",
        sketch_rank: int = 4,
        warmup_steps: int = 100,
        communicator: Communicator | Literal["core"] | None = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"DDPState(model): a DistributedDataParallel, not {type(model).__name__}")
        if predict not in PREDICTIONS or ((chosen := PREDICTIONS[predict]) is not None and chosen.alpha != 1.0):
            raise InvalidArgumentError(
                f'predict={predict!r}: behind a hook choose "sketch", "history" or "none". The others give every rank '
                "weights of its own for a step; use mdas.DistributedOptimizer for those"
            )
        if not (isinstance(sketch_rank, int) and sketch_rank >= 1):
            raise InvalidArgumentError(f"sketch_rank={sketch_rank!r}: an int, at least 1")
        least = _least_warmup(model)
        if not (isinstance(warmup_steps, int) and warmup_steps >= least):
            raise InvalidArgumentError(
                f"warmup_steps={warmup_steps!r}: an int, at least {least}, since DistributedDataParallel divides the "
                f"parameters into buckets anew after {least - 1} backward passes"
            )
        group = model.process_group
        assert group is not None
        device = next(model.parameters()).device
        self._communicator: Communicator = (
            TorchCommunicator(group, device=device) if communicator is None else choose(communicator, None, device)
        )
        if (self._communicator.rank, self._communicator.size) != (dist.get_rank(group), dist.get_world_size(group)):
            raise InvalidArgumentError(
                f"the communicator has rank {self._communicator.rank} of {self._communicator.size}, but the model's "
                f"process group rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
            )
        options = f"DDPState(predict={predict!r}, sketch_rank={sketch_rank}, warmup_steps={warmup_steps})"
        require_agreement(self._communicator, [options])
        self.delayed = True
        """Set to False or True before a backward pass, on all ranks alike: False makes backward passes synchronous."""
        self.steps = 0
        """Backward passes so far that have exchanged gradients."""
        self.exposed_seconds = 0.0
        """Time for which backward passes on this rank waited for communication, from the start of training."""
        self._predict = predict
        self._sketch_rank = sketch_rank
        self._warmup_steps = warmup_steps
        # Not the model: it holds this state, from C++, where Python's garbage collection does not see it.
        self._named = {parameter: (name, parameter) for name, parameter in model.module.named_parameters()}
        self._delay: Corrected | None = None
        self._buckets: list[_Bucket] = []
        self._works: list[Work] = []
        self._delaying = False

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        """One more bucket of this backward pass is full; they come in order."""
        if bucket.index() != len(self._buckets):
            raise RuntimeError(
                f"ddp_hook: bucket {bucket.index()} came after {len(self._buckets)} others of this backward pass. Has "
                "a backward pass been interrupted, or does a second model share this DDPState? Ranks are out of step: "
                "restart all of them from a checkpoint"
            )
        own = _Bucket(bucket.buffer(), bucket.gradients(), bucket.parameters(), Future())
        if not all(parameter in self._named for parameter in own.parameters):
            raise InvalidArgumentError(
                "ddp_hook: a gradient of another model than the one that this DDPState was made for: make one for each "
                "model, mdas.DDPState(model), and register it with that"
            )
        self._buckets.append(own)
        k, delay = len(self._buckets) - 1, self._delay
        if k == 0:
            # With one rank there is nothing to hide.
            self._delaying = self.delayed and self.steps >= self._warmup_steps and self._communicator.size > 1
        if self._delaying and delay is not None and not delay.fits(k, own.parameters):
            raise RuntimeError(
                f"ddp_hook: DistributedDataParallel has divided its parameters anew after {self.steps} backward passes"
                ": wrap the model again, with a new DDPState"
            )
        if self._delaying and delay is not None:
            delay.launch(k, own.gradients)
        else:
            self._works.append(self._communicator.allreduce(own.buffer, own.buffer, op="average", tag=tags.gradient(k)))
        if bucket.is_last():
            self._finish()
        return own.future

    def _finish(self) -> None:
        """All buckets have come, and DistributedDataParallel is about to wait for them: so may we."""
        buckets, self._buckets = self._buckets, []
        gradients = [gradient for own in buckets for gradient in own.gradients]
        if self._delaying and self._delay is not None:
            self._delay.finish(gradients, self._wait)
        else:
            works, self._works = self._works, []
            for work in works:
                self._wait(work)
            self._fitting(buckets).finish_synchronously(gradients, self._wait)
        self.steps += 1
        for own in buckets:
            own.future.set_result(own.buffer)

    def _fitting(self, buckets: Sequence[_Bucket]) -> Corrected:
        """For these buckets; made where there is none."""
        delay = self._delay
        if delay is None or not all(delay.fits(k, own.parameters) for k, own in enumerate(buckets)):
            named = [[self._named[p] for p in own.parameters] for own in buckets]
            delay = self._delay = Corrected(Layout.of(named), self._communicator, self._predict, self._sketch_rank)
        return delay

    @property
    def skipped(self) -> int:
        """Averages that were not finite, and left out."""
        return 0 if self._delay is None else self._delay.skipped

    def _wait(self, work: Work) -> None:
        start = time.perf_counter()
        work.wait()
        self.exposed_seconds += time.perf_counter() - start

    def __repr__(self) -> str:
        who = f"rank {self._communicator.rank} of {self._communicator.size}"
        return f"DDPState(predict={self._predict!r}, {who}, after {self.steps} backward passes)"


def ddp_hook(state: DDPState, bucket: GradBucket) -> Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook(mdas.DDPState(model), mdas.ddp_hook)`.

    From the end of the warm-up on a backward pass waits for the averages of the one before, which had a whole step to
    arrive, and leaves in `param.grad` what `DDPState` describes.

    Raises the errors of the exchange (PeerLostError, CollectiveTimeoutError, MismatchError) out of `backward()`; after
    one, restart from a checkpoint.
    """
    with torch.no_grad():
        return state._take(bucket)
