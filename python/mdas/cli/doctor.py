"""`mdas doctor`: what this machine offers, what `init()` would choose here, and why.

Run it as the job would run (`torchrun ... -m mdas.cli doctor`, `srun mdas doctor`) to see what each rank finds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from mdas import _core, env, network, settings
from mdas.cli import rdma
from mdas.cli.findings import Finding, in_bytes, table
from mdas.errors import Error

_SOCKETS_PER_PEER = 3
"""An urgent connection and two bulk ones."""

_SPARE_FILES = 128
"""Open files that Python, torch and a data loader need beside the connections."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mdas doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report. Exit status 1 if something would fail."""
    findings = list(examine())
    failed = [finding for finding in findings if finding.status == "fail"]
    if options.json:
        report = {"findings": [asdict(f) for f in findings], "failed": [f"{f.topic}: {f.name}" for f in failed]}
        print(json.dumps(report, indent=2))
    else:
        print(table(findings))
        for finding in failed:
            print(f"\nFAIL {finding.topic}, {finding.name}: {finding.value}. {finding.note}")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """All findings. Looks only; listens for a moment on the port that `init()` would use."""
    yield from _versions()
    yield from _processor()
    try:
        job, chosen = env.detect(os.environ), settings.read(os.environ)
    except Error as error:
        yield Finding("launcher", "job", "unusable environment", "fail", str(error))
        return
    yield from _launcher(job)
    yield from _interfaces()
    if job.size > 1:
        yield from _checked("network", "own address", lambda: _own_address(job, chosen))
        yield from _checked("network", "meeting point", lambda: _meeting_point(job))
    yield Finding("network", "congestion control", _read("/proc/sys/net/ipv4/tcp_congestion_control"))
    yield from rdma.examine(job, chosen)
    yield from _limits(job)


def _checked(topic: str, name: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except Error as error:
        yield Finding(topic, name, "none", "fail", str(error))


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "mdas", _core.__version__)
    yield Finding("versions", "python", platform.python_version())
    for package in ("torch", "numpy"):
        try:
            yield Finding("versions", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding("versions", package, "not installed", note="the collectives work without it")
    yield Finding("versions", "kernel", platform.release())


def _processor() -> Iterator[Finding]:
    usable = sorted(os.sched_getaffinity(0))
    yield Finding("processor", "CPUs", f"{len(usable)} of {os.cpu_count()}", note="that this process may use")
    yield Finding("processor", "vector instructions", _core.cpu_level(), note="the best that the kernels found")


def _launcher(job: env.Job) -> Iterator[Finding]:
    yield Finding("launcher", "found", job.launcher, note=job.why)
    yield Finding("launcher", "rank", f"{job.rank} of {job.size}")
    if job.local_rank is not None:
        yield Finding("launcher", "local rank", f"{job.local_rank} of {job.local_size or 'an unknown number'}")
    if job.size > 1:
        yield Finding("launcher", "job", job.job_id)


def _interfaces() -> Iterator[Finding]:
    by_name: dict[str, list[str]] = {}
    for interface in network.interfaces():
        by_name.setdefault(interface.name, []).append(interface.address)
    for name, addresses in by_name.items():
        speed = _read(f"/sys/class/net/{name}/speed")
        known = speed.isdigit() and int(speed) > 0
        yield Finding("network", name, ", ".join(addresses), note=f"{speed} Mbit/s" if known else "")


def _own_address(job: env.Job, chosen: settings.Settings) -> Finding:
    host, port = str(job.master_addr), int(job.master_port or 0)
    address = network.advertised_address(host, port, chosen.interface, job.local_size == job.size)
    listener = _core.Listener(address, chosen.ports, job.rank, job.size, "doctor", b"doctor")
    where = f"MDAS_SOCKET_IFNAME={chosen.interface}" if chosen.interface else f"routes to {host}"
    ports = "any port" if chosen.ports == (0, 0) else f"ports {chosen.ports[0]} to {chosen.ports[1]}"
    return Finding("network", "own address", address, note=f"{where}; {ports}, {listener.port} is free")


def _meeting_point(job: env.Job) -> Finding:
    place = network.endpoint(str(job.master_addr), int(job.master_port or 0))
    if job.uses_agent_store:
        return Finding("network", "meeting point", place, note="the store of torchrun's agent")
    if job.rank != 0:
        return Finding("network", "meeting point", place, note="where rank 0 listens")
    try:
        with socket.create_server(("", int(job.master_port or 0))):
            return Finding("network", "meeting point", place, note="this is rank 0: it listens here, the port is free")
    except OSError as error:
        advice = f"rank 0 cannot listen there ({error.strerror}): set another MASTER_PORT or MDAS_MASTER_PORT"
        return Finding("network", "meeting point", place, "fail", advice)


def _limits(job: env.Job) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _SOCKETS_PER_PEER * (job.size - 1) + _SPARE_FILES
    enough = files == resource.RLIM_INFINITY or files >= needed
    yield Finding(
        "limits",
        "open files (nofile)",
        _limit(files),
        "ok" if enough else "fail",
        f"a job of {job.size} needs about {needed}" + ("" if enough else ": raise it with ulimit -n"),
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = _limit(locked) if locked == resource.RLIM_INFINITY else in_bytes(locked)
    yield Finding("limits", "locked memory (memlock)", amount, note="TCP needs none, RDMA as much as travels")
    if Path("/dev/shm").is_dir():
        shm = os.statvfs("/dev/shm")
        free, whole = in_bytes(shm.f_bavail * shm.f_frsize), in_bytes(shm.f_blocks * shm.f_frsize)
        yield Finding("limits", "/dev/shm", f"{free} free of {whole}", note="TCP needs none, torch's data loaders do")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # virtual devices refuse; other kernels lack the file
        return "unknown"
