"""This host's network interfaces, and the address that a rank advertises to the others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mdas import _core
from mdas.errors import ConfigurationError, Error

_ELSEWHERE = {4: "192.0.2.1:9", 6: "[2001:db8::1]:9"}
"""Documentation addresses (RFC 5737, RFC 3849): routed like any other host that is not here."""


@dataclass(frozen=True)
class Interface:
    """One address of an interface that is up."""

    name: str
    address: str

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The address as a number."""
        return ipaddress.ip_address(self.address)


def interfaces() -> list[Interface]:
    """The addresses of this network namespace that others could reach, in the kernel's order."""
    found = (Interface(name, address) for name, address, up in _core.interfaces() if up)
    # A link-local address means nothing without an interface's index on the other side.
    return [interface for interface in found if not (interface.ip.version == 6 and interface.ip.is_link_local)]


def routed_address(host: str, port: int) -> str:
    """The address from which this host talks to `host` (a name or an address). Sends nothing.

    Raises:
        ConfigurationError: the name does not resolve, or no route leads there.
    """
    try:
        return _core.local_address_towards(endpoint(host, port))
    except Error as error:
        raise ConfigurationError(f"{error}; is MASTER_ADDR (or MDAS_MASTER_ADDR) rank 0's host?") from error


def endpoint(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_address(host: str, port: int, spec: str | None, all_on_this_host: bool) -> str:
    """The address at which the other ranks can reach this one.

    Args:
        host: name or address of the meeting point.
        port: its port.
        spec: what MDAS_SOCKET_IFNAME says; None or "" for nothing.
        all_on_this_host: no rank runs elsewhere.

    Raises:
        ConfigurationError: no interface fits; the message lists those that exist.
    """
    routed = routed_address(host, port)
    address = ipaddress.ip_address(routed)
    if address.is_loopback and not all_on_this_host and not _means_this_host(host):
        # On rank 0's host, its name may stand for the loopback interface (as in Debian's /etc/hosts).
        routed = _address_for_others(address.version) or routed
    return choose(interfaces(), spec, routed)


def _address_for_others(version: int) -> str | None:
    """Where hosts elsewhere would reach this one; None if there is no such address."""
    with suppress(Error):  # a cluster's own network often has no default route
        return _core.local_address_towards(_ELSEWHERE[version])
    return next((i.address for i in interfaces() if i.ip.version == version and not i.ip.is_loopback), None)


def _means_this_host(host: str) -> bool:
    """Is the meeting point one that only ranks of the same host can reach?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def choose(available: Sequence[Interface], spec: str | None, routed: str) -> str:
    """Picks an address.

    Args:
        available: the interfaces.
        spec: interface names, separated by commas, in order of preference; a name stands for all
            that begin with it, `=name` for that one only; a leading `^` turns the list into
            exclusions.
        routed: the address that routing prefers; taken where `spec` leaves the choice.

    Raises:
        ConfigurationError: nothing fits.
    """
    if not spec:
        return routed
    names = [name.strip() for name in spec.removeprefix("^").split(",") if name.strip()]
    if spec.startswith("^"):
        allowed = [i for i in available if not any(_matches(i, name) for name in names)]
        tiers = [sorted(allowed, key=lambda i: i.ip.is_loopback)]
    else:
        tiers = [[i for i in available if _matches(i, name)] for name in names]
    version = ipaddress.ip_address(routed).version
    for tier in tiers:
        addresses = [i.address for i in tier if i.ip.version == version]
        if addresses:
            return routed if routed in addresses else addresses[0]
    existing = ", ".join(f"{i.name} ({i.address})" for i in available)
    raise ConfigurationError(
        f"MDAS_SOCKET_IFNAME={spec}: no interface of that name is up and has an IPv{version} address; "
        f"this host has {existing}"
    )


def _matches(interface: Interface, name: str) -> bool:
    return interface.name == name[1:] if name.startswith("=") else interface.name.startswith(name)
