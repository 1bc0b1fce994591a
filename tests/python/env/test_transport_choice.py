"""Real processes that pretend to be hosts with and without RDMA: what they agree on, and what they say of it."""

from __future__ import annotations

import os

import recorded_devices as recorded
from processes import Ranks, run

# libibverbs may be there or not: these hosts are without.
NO_LIBRARY = {"MDAS_IBVERBS_LIB": "/nonexistent/libibverbs.so.1", "MDAS_LOG": "info"}


def pretend(kinds: list[str]) -> None:
    """Makes this process one on a host of its own, with such devices."""
    from mdas import _core

    rank = int(os.environ["RANK"])
    _core.host_identity = lambda: f"host{rank}"
    tables = {"fabric": recorded.fabric(), "down": recorded.fabric(state="down"), "roce": recorded.rxe("127.0.0.1")}
    if kinds[rank] != "without":
        _core.verbs_devices = lambda: tables[kinds[rank]]
        _core.try_verbs = lambda device, nbytes: None


def summed(kinds: list[str] | None = None) -> list[object]:
    """Over which transport a sum travelled, or why none did."""
    import numpy as np

    import mdas
    from mdas.session import current

    if kinds is not None:
        pretend(kinds)
    try:
        mdas.init(timeout=30)
    except mdas.ConfigurationError as error:
        return ["ConfigurationError", str(error)]
    total = mdas.allreduce(np.full(1000, mdas.rank() + 1.0, np.float32))
    transport = current().engine.transport
    mdas.shutdown()
    return [transport, float(total[0])]


def said(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "INFO init:" in line]


def test_one_node_takes_tcp_and_says_so_once() -> None:
    results = run(2, summed, env=NO_LIBRARY)
    assert [result.value for result in results] == [["tcp", 3.0]] * 2
    assert said(results[0].stderr) == ["mdas[0] INFO init: 2 ranks on 1 node over tcp: all ranks are on one node"]
    assert said(results[1].stderr) == []


def test_nodes_without_rdma_take_tcp_and_say_whose_fault_it_is() -> None:
    results = run(3, summed, ["fabric", "down", "without"], env=NO_LIBRARY)
    assert [result.value for result in results] == [["tcp", 6.0]] * 3
    (line,) = said(results[0].stderr)
    assert line.startswith(
        "mdas[0] INFO init: 3 ranks on 3 nodes over tcp: not verbs, since rank 1: mlx5_0 port 1: it is down: no cable, "
        "or its network interface is down; rank 2: "
    )
    assert "/nonexistent/libibverbs.so.1" in line


def test_different_link_layers_take_tcp() -> None:
    results = run(2, summed, ["fabric", "roce"], env=NO_LIBRARY)
    assert [result.value for result in results] == [["tcp", 3.0]] * 2
    assert "they do not understand each other: rank 0: InfiniBand; rank 1: RoCE v2" in said(results[0].stderr)[0]


def test_verbs_that_one_rank_cannot_use_fails_on_all_of_them_alike() -> None:
    with Ranks(2, summed, ["fabric", "down"], env={**NO_LIBRARY, "MDAS_TRANSPORT": "verbs"}) as ranks:
        results = ranks.wait(60)
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result.value == results[0].value
        kind, message = result.value
        assert kind == "ConfigurationError"
        assert 'transport "verbs" (MDAS_TRANSPORT) cannot be used: rank 1: mlx5_0 port 1: it is down' in message


def test_a_variable_without_sense_is_named_before_anybody_is_met() -> None:
    with Ranks(1, summed, env={"MDAS_IB_PORT": "first"}) as ranks:
        (result,) = ranks.wait(60)
    assert result.value == ["ConfigurationError", "MDAS_IB_PORT: 'first' is not an integer from 1 to 255"]


def test_ranks_must_want_the_same_transport() -> None:
    different = run(2, summed, env=NO_LIBRARY, rank_env=lambda rank: {"MDAS_TRANSPORT": ["auto", "tcp"][rank]})
    for result in different:
        assert "transport differs between ranks: 'auto' on ranks 0; 'tcp' on ranks 1" in result.value[1]
