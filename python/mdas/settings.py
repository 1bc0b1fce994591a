"""What can be set, by `init`'s arguments or by environment variables (arguments win)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mdas import _core
from mdas.errors import ConfigurationError

TRANSPORTS = ("auto", "tcp", "verbs")
LOG_LEVELS = ("off", "error", "warn", "info", "debug", "trace")


@dataclass(frozen=True)
class VerbsSettings:
    """Of the transport "verbs" (RDMA)."""

    device: str | None = None
    """MDAS_IB_DEVICE: devices to choose from, separated by commas; a name stands for all that begin with it,
    `=name` for that one only, `name:port` for that port only; a leading `^` turns the list into exclusions."""
    port: int | None = None
    """MDAS_IB_PORT: this port of a device only."""
    gid_index: int | None = None
    """MDAS_IB_GID_INDEX: this entry of the port's GID table."""
    timeout: int = 18
    """MDAS_IB_TIMEOUT: a packet is sent again after 4.096 us * 2**timeout without an answer; 18 is 1.07 s."""
    retry_count: int = 7
    """MDAS_IB_RETRY_COUNT: how often, before the connection fails."""
    traffic_class: int = 0
    """MDAS_IB_TRAFFIC_CLASS: of packets with a global route header; on RoCE v2 the DSCP value times 4."""
    service_level: int = 0
    """MDAS_IB_SERVICE_LEVEL: of packets, which the fabric maps to virtual lanes or priorities."""
    rails: int = 1
    """MDAS_IB_RAILS: ports to use at once; the job takes as many as every rank has."""
    relaxed_ordering: int = 0
    """MDAS_IB_RELAXED_ORDERING: 1: the device may write to memory in any order, before it reports the completion."""


@dataclass(frozen=True)
class Settings:
    """Settings of a process."""

    timeout: float
    """MDAS_TIMEOUT: seconds without progress after which an operation, or `init`, fails."""
    warn_after: float
    """MDAS_WARN_AFTER: seconds without progress after which a warning names the late ranks."""
    transport: str
    """MDAS_TRANSPORT: "auto", "tcp" or "verbs"; see `selection.decide`."""
    secret: str | None
    """MDAS_SECRET: what the connections of a job authenticate with; None: rank 0 makes a random one."""
    interface: str | None
    """MDAS_SOCKET_IFNAME: see `network.choose`."""
    ports: tuple[int, int]
    """MDAS_PORT_RANGE: first and last port to listen on; (0, 0): any."""
    small_bytes: int | None
    """MDAS_SMALL_BYTES: up to this size, latency decides which algorithm is used."""
    algorithm: str | None
    """MDAS_ALGORITHM: use this one wherever it fits."""
    progress_cpus: tuple[int, ...]
    """MDAS_PROGRESS_CPUS: where the progress thread may run, e.g. 0,2-3; empty: anywhere."""
    log: str
    """MDAS_LOG: a level, or levels of modules as in `warn,mdas_core::engine=debug`."""

    rate_limit: int | None = None
    """MDAS_TCP_RATE_LIMIT: most bytes per second that bulk may send to one rank; a slow network for those who
    have none."""
    verbs: VerbsSettings = VerbsSettings()

    deterministic: bool = False
    """MDAS_DETERMINISTIC: see `mdas.optimizer.determinism`."""

    @property
    def summation(self) -> str:
        """What decides the order of summation, beside operation, type, length and number of ranks."""
        return f"mdas {_core.__version__}, small_bytes={self.small_bytes}, algorithm={self.algorithm}"

    def shared(self) -> dict[str, object]:
        """Those that must be equal on all ranks, since they decide what is sent."""
        return {"transport": self.transport, "small_bytes": self.small_bytes, "algorithm": self.algorithm}


def read(
    environ: Mapping[str, str],
    *,
    timeout: float | None = None,
    warn_after: float | None = None,
    transport: str | None = None,
    secret: str | None = None,
    interface: str | None = None,
) -> Settings:
    """Arguments, else environment variables, else defaults.

    Raises:
        ConfigurationError: a value makes no sense; the message names the variable and the value.
    """
    small_bytes = environ.get("MDAS_SMALL_BYTES")
    rate_limit = environ.get("MDAS_TCP_RATE_LIMIT")
    chosen = Settings(
        timeout=_seconds("timeout", timeout, "MDAS_TIMEOUT", environ, 300.0),
        warn_after=_seconds("warn_after", warn_after, "MDAS_WARN_AFTER", environ, 10.0),
        transport=transport or environ.get("MDAS_TRANSPORT") or "auto",
        secret=secret or environ.get("MDAS_SECRET") or None,
        interface=interface or environ.get("MDAS_SOCKET_IFNAME") or None,
        ports=_range("MDAS_PORT_RANGE", environ.get("MDAS_PORT_RANGE") or "0-0", 65535),
        small_bytes=_integer("MDAS_SMALL_BYTES", small_bytes, 0, 2**63 - 1) if small_bytes else None,
        algorithm=environ.get("MDAS_ALGORITHM") or None,
        progress_cpus=_cpus(environ.get("MDAS_PROGRESS_CPUS") or ""),
        log=_log(environ.get("MDAS_LOG") or "warn"),
        rate_limit=_integer("MDAS_TCP_RATE_LIMIT", rate_limit, 0, 2**32 - 1) if rate_limit else None,
        verbs=_verbs(environ),
        deterministic=bool(_integer("MDAS_DETERMINISTIC", environ.get("MDAS_DETERMINISTIC") or "0", 0, 1)),
    )
    if chosen.transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise ConfigurationError(f"transport {chosen.transport!r} (MDAS_TRANSPORT) is not one of {known}")
    if chosen.algorithm is not None and chosen.algorithm not in _core.ALGORITHMS:
        known = ", ".join(_core.ALGORITHMS)
        raise ConfigurationError(f"MDAS_ALGORITHM: {chosen.algorithm!r} is not one of {known}")
    return chosen


def _seconds(name: str, argument: float | None, variable: str, environ: Mapping[str, str], default: float) -> float:
    text = environ.get(variable)
    try:
        value = float(text) if argument is None and text else default if argument is None else float(argument)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        given = f"{variable}={text!r}" if argument is None else f"{name}={argument!r}"
        raise ConfigurationError(f"{given} is not a positive, finite number of seconds")
    return value


def _integer(variable: str, text: str, least: int, limit: int) -> int:
    # As many digits as the limit has: Python refuses to read thousands.
    if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= limit:
        raise ConfigurationError(f"{variable}: {text!r} is not an integer from {least} to {limit}")
    return int(text)


_VERBS_RANGES = {
    "port": (1, 255),
    "gid_index": (0, 255),
    "timeout": (1, 31),  # 0 would be for ever
    "retry_count": (0, 7),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "rails": (1, 8),
    "relaxed_ordering": (0, 1),
}
"""As wide as the fields that carry them."""


def _verbs(environ: Mapping[str, str]) -> VerbsSettings:
    given = {name: (f"MDAS_IB_{name.upper()}", span) for name, span in _VERBS_RANGES.items()}
    numbers = {name: _integer(key, text, *span) for name, (key, span) in given.items() if (text := environ.get(key))}
    return VerbsSettings(environ.get("MDAS_IB_DEVICE") or None, **numbers)


def _log(text: str) -> str:
    for part in text.split(","):
        level = part.rpartition("=")[2].strip()
        if level.lower() not in LOG_LEVELS:
            known = ", ".join(LOG_LEVELS)
            raise ConfigurationError(
                f"MDAS_LOG={text!r}: {level!r} is not one of {known}; for one module: mdas_core::engine=debug"
            )
    return text


def _range(variable: str, text: str, limit: int) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not low <= high <= limit:
        raise ConfigurationError(f"{variable}: {text!r} is not a range like 2-5 of numbers up to {limit}")
    return low, high


def _cpus(text: str) -> tuple[int, ...]:
    ranges = (_range("MDAS_PROGRESS_CPUS", part, 1023) for part in text.split(",") if part)
    return tuple(cpu for low, high in ranges for cpu in range(low, high + 1))
