"""This process's place in its job, from `init` to `shutdown`."""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass

from mdas import _core, env, mesh, network, rendezvous, settings
from mdas.errors import ClosedError, Error, NotInitializedError

_EXIT_SECONDS = 3.5
"""A script that never calls `shutdown` leaves others' last bytes this long without progress."""


@dataclass(frozen=True)
class Session:
    """What `init` found out and set up."""

    engine: _core.Engine
    job: env.Job
    nodes: tuple[int, ...]
    """Node number of every rank."""
    local_rank: int
    local_size: int
    summation: str
    """See `settings.Settings.summation`."""


class _State:
    """The one mutable thing of this module."""

    session: Session | None = None
    generation: int = 0
    forked_from: int | None = None
    kept: list[Session] = []  # noqa: RUF012 - a forked child never lets go of its parent's sessions


def init(
    *,
    timeout: float | None = None,
    warn_after: float | None = None,
    transport: str | None = None,
    secret: str | None = None,
    interface: str | None = None,
) -> None:
    """Joins the job that this process was started for: by torchrun, `srun`, `mpirun`, or alone.

    Collective over all ranks of the job. A job of one process opens no sockets. After `shutdown`
    it may be called again. Every argument has an environment variable, which it overrides.

    Args:
        timeout: seconds without progress after which joining, or any later operation, fails
            (MDAS_TIMEOUT, default 300). Groups and operations may have their own.
        warn_after: seconds without progress after which a warning names the late ranks
            (MDAS_WARN_AFTER, default 10).
        transport: "auto", "tcp" or "verbs" (RDMA; MDAS_TRANSPORT). "auto" takes verbs where the job spans
            several nodes, between ranks that can, else TCP, and logs why (MDAS_LOG=info).
        secret: what the job's connections authenticate with (MDAS_SECRET; default: a random one
            that rank 0 hands out through the launcher's store). Payload is not encrypted.
        interface: network interfaces to use, e.g. "ib0,eth" or "^docker,virbr"
            (MDAS_SOCKET_IFNAME; default: the one that routes to the meeting point).

    Raises:
        ConfigurationError: the launcher's variables or the settings make no sense or differ
            between ranks, some ranks did not come, or some cannot use the transport asked for.
        PeerLostError: a rank was lost while joining.
        Error: `init` has been called already, or the operating system refused something.
    """
    _refuse_forked_child()
    if _State.session is not None:
        raise Error("mdas.init() has been called already; call mdas.shutdown() first to join anew")
    # Counted before anything can fail here: a rank that fails must not fall behind the others' count.
    _State.generation += 1
    job = env.detect(os.environ)
    chosen = settings.read(
        os.environ,
        timeout=timeout,
        warn_after=warn_after,
        transport=transport,
        secret=secret,
        interface=interface,
    )
    _core.start_logging(job.rank, chosen.log)
    _State.session = _join(job, chosen)


def _join(job: env.Job, chosen: settings.Settings) -> Session:
    if job.size == 1:
        return Session(mesh.alone(chosen), job, (0,), 0, 1, chosen.summation)
    deadline = time.monotonic() + chosen.timeout
    place = rendezvous.Place(job, _State.generation, deadline)
    address = network.advertised_address(place.host, place.port, chosen.interface, job.local_size == job.size)
    secret = place.secret(chosen.secret)
    engine, nodes = mesh.connect(place, job.rank, job.size, address, secret, chosen, deadline, job.local_rank)
    here = [rank for rank, node in enumerate(nodes) if node == nodes[job.rank]]
    return Session(
        engine=engine,
        job=job,
        nodes=nodes,
        local_rank=here.index(job.rank) if job.local_rank is None else job.local_rank,
        local_size=len(here) if job.local_size is None else job.local_size,
        summation=chosen.summation,
    )


def shutdown(timeout: float = 30.0) -> None:
    """Leaves the job. Operations in flight may finish first. Harmless if `init` was not called.

    What others still wait for from this rank fails there with PeerLostError, so call it at the
    same point on all ranks.

    Args:
        timeout: seconds without progress after which what is in flight is given up.
    """
    session, _State.session = _State.session, None
    if session is not None and _State.forked_from is None:
        session.engine.shutdown(timeout)


def current() -> Session:
    """The session.

    Raises:
        NotInitializedError: there is none.
        ClosedError: this is a forked child of the process that has one.
    """
    _refuse_forked_child()
    if _State.session is None:
        raise NotInitializedError("mdas is not initialized: call mdas.init() first")
    return _State.session


def is_initialized() -> bool:
    """Between `init` and `shutdown`? False in a forked child."""
    return _State.session is not None


def rank() -> int:
    """This process's rank in the job, from 0."""
    return current().job.rank


def size() -> int:
    """Number of processes in the job (the world size)."""
    return current().job.size


def local_rank() -> int:
    """This process's rank among those of its node: the launcher's, else counted."""
    return current().local_rank


def local_size() -> int:
    """Number of the job's processes on this node: the launcher's, else counted."""
    return current().local_size


def node() -> int:
    """Number of this process's node, from 0: processes that share a kernel and a network namespace."""
    return current().nodes[rank()]


def _refuse_forked_child() -> None:
    if _State.forked_from is not None:
        raise ClosedError(
            f"this process was forked from process {_State.forked_from} after mdas.init(), and has no place in its "
            'job: use mdas in the parent only, or start children with the "spawn" method'
        )


def _after_fork_in_child() -> None:
    session, _State.session = _State.session, None
    if session is not None:
        # Never freed: its locks may be held by threads that do not exist here.
        _State.kept.append(session)
        _State.forked_from = os.getppid()
        session.engine.abandon()


def _at_exit() -> None:
    shutdown(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
