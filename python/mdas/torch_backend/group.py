"""The process group that `torch.distributed` sees."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mdas.torch_backend import tensors
from mdas.torch_backend.collectives import Collectives
from mdas.torch_backend.mesh import Mesh
from mdas.torch_backend.reductions import Reduction
from mdas.torch_backend.work import Work, seconds

if TYPE_CHECKING:
    # torch's stubs overload most methods for the ways in which scripts may call them; torch itself uses one.
    _Base = Any
else:
    _Base = dist.ProcessGroup

_CPU = torch.device("cpu")
_MAX_SHUTDOWN_SECONDS = 30.0

Tensors = list[torch.Tensor]


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """What torch calls to make a process group, on each of its members.

    A group within the default one shares its engine, if that is mdas's; else the members connect anew, through the
    store. An engine that `mdas.init()` made is never shared: it stays open after `destroy_process_group`.

    Args:
        options: torch's `_DistributedBackendOptions`.
        backend_options: what the script passed as `pg_options`; there are none.

    Raises:
        TypeError: there are some nevertheless.
        ConfigurationError: as `Mesh.through_store`, like those that follow.
        PeerLostError: see there.
        Error: see there.
    """
    if backend_options is not None:
        raise TypeError(f"the backend mdas has no pg_options, but got {backend_options!r}: set variables (MDAS_...)")
    ranks: Sequence[int] = options.global_ranks_in_group
    parent = c10d._world.default_pg
    if ranks and isinstance(parent, ProcessGroup):
        engine_group = parent.mesh.engine.new_group(list(ranks), f"torch {options.group_id}")
        return ProcessGroup(parent.mesh, engine_group, ranks, options.group_rank, options.timeout, owner=False)
    mesh = Mesh.through_store(options.store, options.group_rank, options.group_size, options.timeout)
    return ProcessGroup(mesh, 0, range(options.group_size), options.group_rank, options.timeout, owner=True)


class ProcessGroup(_Base):  # type: ignore[misc]
    """Collectives and messages on dense tensors in CPU memory; strided ones are copied on the way.

    Made by `torch.distributed.init_process_group("mdas")` and `new_group`; scripts use the functions of
    `torch.distributed`. Every operation starts at once and returns a `Work`. It fails, with all that follow in its
    group, after the group's timeout without progress, or its own (`opts.timeout`), which all ranks then pass alike.

    All operations raise TypeError for tensors and reductions that do not fit, InvalidArgumentError (a ValueError)
    for numbers and sizes that do not, before anything is sent; `Work.wait` raises what goes wrong later.
    """

    def __init__(
        self, mesh: Mesh, engine_group: int, ranks: Sequence[int], rank: int, timeout: timedelta, *, owner: bool
    ) -> None:
        """A group of the engine as a process group; `owner`: the engine ends with it. See `create`."""
        super().__init__(rank, len(ranks))
        self.mesh = mesh
        self._do = Collectives(mesh, engine_group, ranks, rank)
        self._owner = owner
        self._timeout = timeout.total_seconds()
        self._coalesced: list[Work] | None = None
        self._group_name = ""

    # What torch asks about a group. Its own answers come from backends in C++, of which there is none here.

    def getBackendName(self) -> str:
        """What `init_process_group` calls it."""
        return "mdas"

    _get_backend_name = getBackendName
    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._group_name = name

    def getGroupName(self) -> str:
        """The name that torch gave it, for torch's C++."""
        return self._group_name

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch still makes the group: it takes that as the sign of a group without a backend in C++, to
        # which it cannot attach its flight recorder.
        return [_CPU] if self in c10d._world.pg_map else []

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if device.type != "cpu":
            raise RuntimeError(f"the backend mdas moves tensors in CPU memory, not on {device}")
        return self

    get_backend = _get_backend

    supports_coalescing = False
    """torch is to make a batch of messages one by one; they all start at once anyway."""

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that start from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leaves the other ranks, after what is in flight; called by `destroy_process_group`."""
        if self._owner:
            self.mesh.shutdown(min(self._timeout, _MAX_SHUTDOWN_SECONDS))

    def abort(self) -> None:
        """Leaves without waiting for what is in flight, which fails within two seconds. In a group that shares an
        engine, which stays for the others, it fails after its timeout.
        """
        if self._owner:
            self.mesh.shutdown(0.0)

    # Coalescing: what is started meanwhile becomes one work.

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalesced is not None:
            raise RuntimeError("operations are being coalesced already: end that first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._do.joined(works)

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _limit(self, opts: Any) -> float:
        return seconds(getattr(opts, "timeout", None)) or self._timeout

    # Everybody gets the same.

    def broadcast(self, tensors_: Tensors, opts: Any = None) -> Work:
        """The tensors of `opts.rootRank`, to all."""
        root = 0 if opts is None else opts.rootRank
        return self._noted(self._do.broadcast(_listed(tensors_), root, self._limit(opts)))

    def allreduce(self, tensors_: Tensors, opts: Any = None) -> Work:
        """Each tensor becomes its reduction over all ranks."""
        return self._noted(self._do.reduce(_listed(tensors_), _reduction(opts), self._limit(opts)))

    def reduce(self, tensors_: Tensors, opts: Any) -> Work:
        """As `allreduce`, on rank `opts.rootRank` only; on the others the tensors stay as they are."""
        here = opts.rootRank == self._do.rank
        return self._noted(self._do.reduce(_listed(tensors_), _reduction(opts), self._limit(opts), here=here))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """`output`, of `size` times as many elements, holds all ranks' `input` in rank order."""
        return self._noted(self._do.gather_into(output, input, self._limit(opts)))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several `all_gather_single` as one."""
        pairs = zip(outputs, inputs, strict=True)
        return self._noted(self._do.joined([self._do.gather_into(*pair, self._limit(opts)) for pair in pairs]))

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        """`output_tensors[i][r]` becomes `input_tensors[i]` of rank r; lengths may differ from rank to rank."""
        pairs = zip(output_tensors, input_tensors, strict=True)
        return self._noted(self._do.joined([self._do.gather_list(*pair, self._limit(opts)) for pair in pairs]))

    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """`output_lists[r][i]` becomes `input_list[i]` of rank r."""
        return self.allgather([list(row) for row in zip(*output_lists, strict=True)], input_list, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Over when every rank of the group has called it."""
        return self._noted(self._do.barrier(self._limit(opts)))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at which rank 0 names the ranks that did not come.

        After a failure it cannot be used again in this group, since the late rank may still come.

        Args:
            timeout: how long rank 0 waits for the others.
            wait_all_ranks: name all missing ranks, not just the first one.

        Raises:
            CollectiveTimeoutError: some rank did not come; on all ranks that did.
        """
        self._do.channels.monitored_barrier(timeout or timedelta(seconds=self._timeout), wait_all_ranks)

    # Everybody, or one rank, gets a part.

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """`output` of rank r = part r of `size` equal parts of the reduction of all ranks' `input`."""
        return self._noted(self._do.scatter_reduced(output, input, _reduction(opts), self._limit(opts)))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Several `reduce_scatter_single` as one."""
        rest = (_reduction(opts), self._limit(opts))
        pairs = zip(outputs, inputs, strict=True)
        return self._noted(self._do.joined([self._do.scatter_reduced(*pair, *rest) for pair in pairs]))

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any = None) -> Work:
        """`output_tensors[i]` of rank r = reduction of all ranks' `input_tensors[i][r]`; lengths may differ with r."""
        rest = (_reduction(opts), self._limit(opts))
        pairs = zip(output_tensors, input_tensors, strict=True)
        return self._noted(self._do.joined([self._do.scatter_reduced_list(*pair, *rest) for pair in pairs]))

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        """`output_tensors[i][r]` on rank `opts.rootRank` becomes `input_tensors[i]` of rank r."""
        lists = output_tensors if self._do.rank == opts.rootRank else [[] for _ in input_tensors]
        rest = (opts.rootRank, self._limit(opts))
        pairs = zip(lists, input_tensors, strict=True)
        return self._noted(self._do.joined([self._do.gather(*pair, *rest) for pair in pairs]))

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """`output` on rank `opts.rootRank`, cut into equal parts, holds all ranks' `input` in rank order."""
        here = self._do.rank == opts.rootRank
        return self.gather([tensors.split(output, (), self._do.size, "the output")] if here else [], [input], opts)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        """`output_tensors[i]` of rank r becomes `input_tensors[i][r]` of rank `opts.rootRank`."""
        lists = input_tensors if self._do.rank == opts.rootRank else [[] for _ in output_tensors]
        rest = (opts.rootRank, self._limit(opts))
        pairs = zip(output_tensors, lists, strict=True)
        return self._noted(self._do.joined([self._do.scatter(*pair, *rest) for pair in pairs]))

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """`output_tensors[r]` becomes `input_tensors[this rank]` of rank r."""
        return self._noted(self._do.all_to_all(output_tensors, input_tensors, self._limit(opts)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """As `alltoall`, on parts of tensors along their first dimension; no sizes: equal parts."""
        outputs = tensors.split(output, output_split_sizes or (), self._do.size, "the output")
        return self.alltoall(outputs, tensors.split(input, input_split_sizes or (), self._do.size, "the input"), opts)

    # Messages.

    def send(self, tensors_: Tensors, dst: int, tag: int) -> Work:
        """To rank `dst` of the group, whose receive has the same tag, type and number of elements."""
        channels = self._do.channels
        return self._noted(self._do.joined([channels.sending(t, dst, tag, self._timeout) for t in tensors_]))

    def recv(self, tensors_: Tensors, src: int, tag: int) -> Work:
        """From rank `src` of the group. Messages of one tag arrive in the order in which they were sent."""
        channels = self._do.channels
        return self._noted(self._do.joined([channels.receiving(t, src, tag, self._timeout) for t in tensors_]))

    def recv_anysource(self, tensors_: Tensors, tag: int) -> Work:
        """Always raises NotImplementedError."""
        raise NotImplementedError(
            "the backend mdas receives from a rank that is named: pass src=. Where it is not known, exchange numbers "
            "first (all_gather), or use a group of the backend gloo for these messages"
        )

    # What there is not; torch's own errors would not say what to do instead.

    @property
    def supports_splitting(self) -> bool:
        """Always raises NotImplementedError."""
        raise _refusal("split_group", "call new_group(ranks, backend='mdas'), which shares the connections as well")

    def _wait_for_pending_works(self) -> None:
        raise _refusal("list of pending works", "wait for the works that the operations returned")

    def _register_on_completion_hook(self, hook: Any) -> None:
        raise _refusal("completion hooks", "hang a callback on the work's get_future()")

    def _get_sequence_number_for_group(self) -> int:
        raise _refusal("sequence numbers", "calls that do not fit raise MismatchError without them")

    supports_abort_hooks = supports_completion_hooks = supports_reconfigure = supports_window = False

    # Other versions of torch, and its C++, ask for the same by other names.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single
    recvAnysource = recv_anysource
    monitoredBarrier = monitored_barrier


def _refusal(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"the backend mdas has no {what}: {instead}")


def _listed(tensors_: Any) -> Tensors:
    return [tensors_] if isinstance(tensors_, torch.Tensor) else list(tensors_)


def _reduction(opts: Any) -> Reduction:
    return Reduction.of(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
