"""The collectives of a process group, by the engine's collectives and by messages.

Everything starts at once and returns a `Work`. Arguments are those of torch's process groups, but for their options,
of which only root, reduction and timeout (in seconds) matter here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdas import _core
from mdas.errors import InvalidArgumentError
from mdas.torch_backend import reductions, tensors
from mdas.torch_backend.mesh import Mesh
from mdas.torch_backend.point_to_point import Channels
from mdas.torch_backend.reductions import Reduction
from mdas.torch_backend.work import Step, Work

Tensors = Sequence[torch.Tensor]


class Collectives:
    """Those of one group of an engine, in which this process has rank `rank` of `size`."""

    def __init__(self, mesh: Mesh, group: int, ranks: Sequence[int], rank: int) -> None:
        """Sends nothing.

        Args:
            mesh: whose engine does the work.
            group: the engine's number of the group.
            ranks: world ranks of its members.
            rank: of this process, within the group.
        """
        self.rank, self.size = rank, len(ranks)
        self.channels = Channels(mesh, group, ranks, rank)
        self._mesh, self._engine, self._group = mesh, mesh.engine, group

    def joined(self, works: Sequence[Work]) -> Work:
        """Several works as one."""
        return works[0] if len(works) == 1 else Work.joined(self._mesh, self._group, works)

    def _work(self, parts: Sequence[_core.Work], steps: Sequence[Step] = (), result: Tensors = ()) -> Work:
        return Work(self._mesh, self._group, parts, steps, result)

    # Everybody gets the same.

    def broadcast(self, inputs: Tensors, root: int, timeout: float) -> Work:
        """The tensors of `root`, to all."""
        steps: list[Step] = []
        areas = [tensors.view(tensors.in_place(tensor, steps)) for tensor in inputs]
        parts = [self._engine.broadcast(self._group, area, root, timeout=timeout) for area in areas]
        return self._work(parts, steps, inputs)

    def reduce(self, inputs: Tensors, reduction: Reduction, timeout: float, *, here: bool = True) -> Work:
        """Each tensor becomes its reduction over all ranks, if it is wanted `here`; else it stays as it is."""
        steps: list[Step] = []
        parts = []
        for tensor, op in [(tensor, reduction.core_op(tensor.dtype)) for tensor in inputs]:
            source = reductions.source(tensor, reduction)
            target = reductions.target(tensor, reduction, steps) if here else torch.empty_like(source)
            parts.append(self._reduce_flat(source, target, op, reduction, timeout, steps))
        return self._work(parts, steps, inputs)

    def _reduce_flat(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        op: str | None,
        reduction: Reduction,
        timeout: float,
        steps: list[Step],
    ) -> _core.Work:
        if op is None:
            rows = torch.empty((self.size, *source.shape), dtype=source.dtype)
            # First of all: what follows may copy from the target.
            steps.insert(0, lambda: target.copy_(reduction.combine(rows)))
            return self._gather_flat(tensors.as_native(source), tensors.as_native(rows.view(-1)), timeout)
        return self._engine.allreduce(self._group, tensors.view(source), tensors.view(target), op, timeout=timeout)

    def _gather_flat(self, source: torch.Tensor, target: torch.Tensor, timeout: float) -> _core.Work:
        if tensors.overlap(source, target):  # as when every rank's part lies at its place already
            source = source.clone()
        return self._engine.allgather(self._group, tensors.view(source), tensors.view(target), timeout=timeout)

    def gather_into(self, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> Work:
        """`output`, of `size` times as many elements, holds all ranks' tensors in rank order."""
        tensors.check_same_dtype("all_gather_into_tensor", [output, tensor])
        if output.numel() != tensor.numel() * self.size:
            raise InvalidArgumentError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, but {self.size} ranks x "
                f"{tensor.numel()} are {tensor.numel() * self.size}"
            )
        steps: list[Step] = []
        target = tensors.to_receive(output, steps)
        return self._work([self._gather_flat(tensors.to_send(tensor), target, timeout)], steps, [output])

    def gather_list(self, outputs: Tensors, tensor: torch.Tensor, timeout: float) -> Work:
        """`outputs[r]` becomes the tensor of rank r; lengths may differ from rank to rank."""
        tensors.check_length("all_gather: the output list", outputs, self.size)
        tensors.check_same_dtype("all_gather", [*outputs, tensor])
        if outputs[self.rank].numel() != tensor.numel():
            raise InvalidArgumentError(
                f"all_gather: the input has {tensor.numel()} elements, but the output list's place for it "
                f"{outputs[self.rank].numel()}"
            )
        for output in outputs:
            tensors.check(output)
        longest = max(output.numel() for output in outputs)
        source = tensors.plain(tensor)
        if source.numel() < longest:
            source = torch.cat([source, source.new_zeros(longest - source.numel())])
        rows = torch.empty((self.size, longest), dtype=tensor.dtype)

        def spread() -> None:
            for output, row in zip(outputs, rows, strict=True):
                output.detach().copy_(row[: output.numel()].view(output.shape))

        part = self._gather_flat(tensors.as_native(source), tensors.as_native(rows.view(-1)), timeout)
        return self._work([part], [spread], outputs)

    def barrier(self, timeout: float) -> Work:
        """Over when every rank has called it; in order with everything else."""
        return self._work([self._engine.barrier(self._group, "bulk", timeout=timeout)])

    # Everybody gets a part.

    def scatter_reduced(self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction, timeout: float) -> Work:
        """`output` of rank r = part r of `size` equal parts of the reduction of all ranks' tensors."""
        tensors.check_same_dtype("reduce_scatter_tensor", [output, tensor])
        if tensor.numel() != output.numel() * self.size:
            raise InvalidArgumentError(
                f"reduce_scatter_tensor: the input has {tensor.numel()} elements, but {self.size} ranks x "
                f"{output.numel()} are {output.numel() * self.size}"
            )
        op = reduction.core_op(tensor.dtype)
        steps: list[Step] = []
        source = reductions.source(tensor, reduction)
        target = reductions.target(output, reduction, steps)
        return self._work([self._scatter_flat(source, target, op, reduction, timeout, steps)], steps, [output])

    def _scatter_flat(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        op: str | None,
        reduction: Reduction,
        timeout: float,
        steps: list[Step],
    ) -> _core.Work:
        if op is None:
            whole = torch.empty_like(source)
            own = whole.view(self.size, -1)[self.rank]
            steps.insert(0, lambda: target.copy_(own))
            return self._reduce_flat(source, whole, op, reduction, timeout, steps)
        if tensors.overlap(source, target):
            source = source.clone()
        return self._engine.reduce_scatter(self._group, tensors.view(source), tensors.view(target), op, timeout=timeout)

    def scatter_reduced_list(self, output: torch.Tensor, inputs: Tensors, reduction: Reduction, timeout: float) -> Work:
        """`output` of rank r = reduction of all ranks' `inputs[r]`; lengths may differ with r."""
        tensors.check_length("reduce_scatter: the input list", inputs, self.size)
        tensors.check_same_dtype("reduce_scatter", [output, *inputs])
        tensors.check(output)
        if inputs[self.rank].numel() != output.numel():
            raise InvalidArgumentError(
                f"reduce_scatter: the output has {output.numel()} elements, but the input list's part for it "
                f"{inputs[self.rank].numel()}"
            )
        op = reduction.core_op(output.dtype)
        longest = max(tensor.numel() for tensor in inputs)
        rows = torch.zeros((self.size, longest), dtype=output.dtype)
        for row, tensor in zip(rows, inputs, strict=True):
            row[: tensor.numel()] = tensors.plain(tensor)
        padded = torch.empty(longest, dtype=output.dtype)
        steps: list[Step] = []
        source, target = reductions.source(rows, reduction), reductions.target(padded, reduction, steps)
        part = self._scatter_flat(source, target, op, reduction, timeout, steps)
        steps.append(lambda: output.detach().copy_(padded[: output.numel()].view(output.shape)))
        return self._work([part], steps, [output])

    # Made of messages.

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, timeout: float) -> Work:
        """`outputs[r]` on rank `root` becomes the tensor of rank r."""
        incoming: dict[int, torch.Tensor] = {}
        if self.rank == root:
            tensors.check_length("gather: the output list", outputs, self.size)
            incoming = dict(enumerate(outputs))
        return self.channels.exchange({root: tensor}, incoming, timeout)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int, timeout: float) -> Work:
        """`output` of rank r becomes `inputs[r]` of rank `root`."""
        outgoing: dict[int, torch.Tensor] = {}
        if self.rank == root:
            tensors.check_length("scatter: the input list", inputs, self.size)
            outgoing = dict(enumerate(inputs))
        return self.channels.exchange(outgoing, {root: output}, timeout)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> Work:
        """`outputs[r]` becomes `inputs[this rank]` of rank r."""
        tensors.check_length("all_to_all: the output list", outputs, self.size)
        tensors.check_length("all_to_all: the input list", inputs, self.size)
        return self.channels.exchange(dict(enumerate(inputs)), dict(enumerate(outputs)), timeout)
