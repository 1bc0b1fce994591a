"""The Rust core of mdas. Use it through the package `mdas`."""

from collections.abc import Sequence
from typing import Any, Final, final

from typing_extensions import Buffer

__all__ = [
    "ALGORITHMS",
    "Adam",
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "Engine",
    "EngineSettings",
    "Error",
    "Identity",
    "InvalidArgumentError",
    "Listener",
    "Memory",
    "MismatchError",
    "PeerLostError",
    "Sgd",
    "Update",
    "VerbsChoice",
    "VerbsDevice",
    "VerbsGid",
    "VerbsOptions",
    "VerbsPort",
    "View",
    "Work",
    "__version__",
    "choose_verbs",
    "copy_sqnorm",
    "cpu_level",
    "dot",
    "expand",
    "fused_update",
    "host_identity",
    "interfaces",
    "local_address_towards",
    "log",
    "loopback",
    "meet",
    "name_tags",
    "orthonormalize",
    "sqdist",
    "sqnorm",
    "start_logging",
    "times",
    "transposed_times",
    "try_verbs",
    "verbs_devices",
    "verbs_in_use",
    "verbs_live",
]

__version__: Final[str]
ALGORITHMS: Final[list[str]]

# Exceptions: see mdas.errors.

class Error(RuntimeError): ...
class InvalidArgumentError(Error, ValueError): ...
class ConfigurationError(Error): ...
class MismatchError(Error): ...

class PeerLostError(Error):
    peer: int

class CollectiveTimeoutError(Error, TimeoutError): ...
class ClosedError(Error): ...

# Memory.

@final
class Memory(Buffer):
    def __new__(cls, nbytes: int) -> Memory: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Identity:
    def __new__(cls) -> Identity: ...

@final
class View:
    @staticmethod
    def from_buffer(obj: object, writable: bool, identity: Identity | None = None) -> View: ...
    @staticmethod
    def from_address(address: int, count: int, dtype: str, owner: Any, identity: Identity | None = None) -> View: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...

# The engine.

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def times(self) -> tuple[int, int, int] | None: ...

@final
class EngineSettings:
    def __new__(
        cls,
        timeout: float = 300.0,
        warn_after: float = 10.0,
        small_bytes: int | None = None,
        algorithm: str | None = None,
        cpus: Sequence[int] = ...,
        rate_limit: int | None = None,
    ) -> EngineSettings: ...

@final
class Engine:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def new_group(self, ranks: Sequence[int], purpose: str = "") -> int: ...
    def allreduce(
        self,
        group: int,
        input: View,
        output: View,
        op: str = "sum",
        lane: str = "bulk",
        tag: int = 0,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work: ...
    def broadcast(
        self,
        group: int,
        input: View,
        root: int,
        lane: str = "bulk",
        tag: int = 0,
        timeout: float | None = None,
        blocking: bool = False,
        output: View | None = None,
    ) -> Work: ...
    def allgather(
        self,
        group: int,
        input: View,
        output: View,
        lane: str = "bulk",
        tag: int = 0,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work: ...
    def reduce_scatter(
        self,
        group: int,
        input: View,
        output: View,
        op: str = "sum",
        lane: str = "bulk",
        tag: int = 0,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work: ...
    def barrier(
        self,
        group: int,
        lane: str = "urgent",
        tag: int = 0,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work: ...
    def counters(self) -> dict[str, int]: ...
    def abandon(self) -> None: ...
    def shutdown(self, deadline: float) -> None: ...

def loopback(size: int, settings: EngineSettings | None = None, nodes: Sequence[int] | None = None) -> list[Engine]: ...

# Joining.

@final
class Listener:
    def __new__(
        cls, address: str, ports: tuple[int, int], rank: int, size: int, job: str, secret: bytes
    ) -> Listener: ...
    @property
    def port(self) -> int: ...
    def close(self) -> None: ...
    def connect(
        self,
        members: Sequence[tuple[str, int]],
        nodes: Sequence[int],
        settings: EngineSettings,
        configuration: str,
        deadline: float,
        verbs: VerbsOptions | None = None,
        over_verbs: Sequence[bool] = ...,
    ) -> Engine: ...

def meet(rank: int, size: int, job: str, secret: bytes, address: str, blob: bytes, deadline: float) -> list[bytes]: ...
def interfaces() -> list[tuple[str, str, bool]]: ...
def local_address_towards(address: str) -> str: ...
def host_identity() -> str: ...
def start_logging(rank: int, filter: str) -> None: ...
def name_tags(first: int, last: int, words: str) -> None: ...
def log(level: str, message: str) -> None: ...

# RDMA. Words are those of rust/verbs/src/table.rs: "active", "Ethernet", "RoCE v2", ...

@final
class VerbsGid:
    def __new__(cls, index: int, address: str, kind: str, interface: str | None) -> VerbsGid: ...
    @property
    def index(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def interface(self) -> str | None: ...

@final
class VerbsPort:
    def __new__(
        cls,
        number: int,
        state: str,
        link_layer: str,
        lid: int,
        sm_lid: int,
        grh_required: bool,
        active_mtu: int,
        max_msg_size: int,
        mbit_per_s: int,
        gids: Sequence[VerbsGid],
    ) -> VerbsPort: ...
    @property
    def number(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def link_layer(self) -> str: ...
    @property
    def lid(self) -> int: ...
    @property
    def sm_lid(self) -> int: ...
    @property
    def grh_required(self) -> bool: ...
    @property
    def active_mtu(self) -> int: ...
    @property
    def max_msg_size(self) -> int: ...
    @property
    def mbit_per_s(self) -> int: ...
    @property
    def gids(self) -> list[VerbsGid]: ...

@final
class VerbsDevice:
    def __new__(
        cls,
        name: str,
        protocol: str,
        guid: int,
        firmware: str,
        numa_node: int | None,
        pci_path: str | None,
        ports: Sequence[VerbsPort],
        fault: str | None,
    ) -> VerbsDevice: ...
    @property
    def name(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def guid(self) -> int: ...
    @property
    def firmware(self) -> str: ...
    @property
    def numa_node(self) -> int | None: ...
    @property
    def pci_path(self) -> str | None: ...
    @property
    def ports(self) -> list[VerbsPort]: ...
    @property
    def fault(self) -> str | None: ...

@final
class VerbsChoice:
    @property
    def device(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def gid_index(self) -> int: ...
    @property
    def gid(self) -> str: ...
    @property
    def gid_kind(self) -> str: ...
    @property
    def lid(self) -> int: ...
    @property
    def mtu(self) -> int: ...
    @property
    def why(self) -> str: ...
    @property
    def warnings(self) -> list[str]: ...

@final
class VerbsOptions:
    def __new__(
        cls,
        rails: Sequence[VerbsChoice],
        timeout: int,
        retry_count: int,
        traffic_class: int,
        service_level: int,
        relaxed_ordering: bool,
    ) -> VerbsOptions: ...

def try_verbs(device: str, nbytes: int) -> None: ...
def verbs_devices() -> list[VerbsDevice]: ...
def verbs_in_use() -> bool: ...
def verbs_live() -> dict[str, int]: ...
def choose_verbs(
    devices: Sequence[VerbsDevice],
    wanted: str | None = None,
    port: int | None = None,
    gid_index: int | None = None,
    route: str | None = None,
    local_rank: int = 0,
    numa_node: int | None = None,
    gpu_path: str | None = None,
    rails: int = 1,
) -> list[VerbsChoice]: ...

# Kernels, on addresses of float32 elements.

@final
class Sgd:
    def __new__(
        cls,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        first: bool = False,
    ) -> Sgd: ...

@final
class Adam:
    def __new__(
        cls,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: int,
        maximize: bool = False,
    ) -> Adam: ...

@final
class Update:
    def __new__(
        cls, rule: Sgd | Adam, gradient: int, local: int | None = None, alpha: float = 1.0, scale: float = 1.0
    ) -> Update: ...

def fused_update(
    count: int,
    base: int,
    state: Sequence[int],
    real: Update | None = None,
    forward: int | None = None,
    prediction: Update | None = None,
) -> None: ...
def copy_sqnorm(target: int, source: int, count: int) -> float: ...
def sqnorm(a: int, count: int) -> float: ...
def sqdist(a: int, b: int, count: int) -> float: ...
def dot(a: int, b: int, count: int) -> float: ...
def times(rows: int, columns: int, rank: int, d: int, r: int, p: int) -> None: ...
def transposed_times(rows: int, columns: int, rank: int, d: int, p: int, r: int) -> None: ...
def expand(rows: int, columns: int, rank: int, h: int, p: int, r: int, c: int) -> None: ...
def orthonormalize(rows: int, rank: int, p: int, seed: int) -> tuple[int, int]: ...
def cpu_level() -> str: ...
