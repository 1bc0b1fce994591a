"""Arguments, environment variables, defaults."""

from __future__ import annotations

import pytest

from mdas import settings
from mdas.errors import ConfigurationError
from mdas.settings import VerbsSettings


def test_arguments_beat_variables_beat_defaults() -> None:
    assert settings.read({}).timeout == 300
    assert settings.read({"MDAS_TIMEOUT": "2.5"}).timeout == 2.5
    assert settings.read({"MDAS_TIMEOUT": "nonsense"}, timeout=7).timeout == 7
    chosen = settings.read({"MDAS_SECRET": "s", "MDAS_SOCKET_IFNAME": "ib", "MDAS_TRANSPORT": "tcp"}, interface="eth")
    assert (chosen.secret, chosen.interface, chosen.transport) == ("s", "eth", "tcp")


def test_ranges() -> None:
    chosen = settings.read({"MDAS_PORT_RANGE": "20000-20100", "MDAS_PROGRESS_CPUS": "0,2-4"})
    assert (chosen.ports, chosen.progress_cpus) == ((20000, 20100), (0, 2, 3, 4))
    assert settings.read({"MDAS_PORT_RANGE": "20000"}).ports == (20000, 20000)


def test_verbs() -> None:
    assert settings.read({}).verbs == VerbsSettings()
    given = {
        "DEVICE": "mlx5_0,^x",
        "PORT": "2",
        "GID_INDEX": "0",
        "TIMEOUT": "31",
        "RETRY_COUNT": "0",
        "TRAFFIC_CLASS": "104",
        "SERVICE_LEVEL": "15",
        "RAILS": "8",
        "RELAXED_ORDERING": "1",
    }
    chosen = settings.read({f"MDAS_IB_{name}": value for name, value in given.items()})
    assert chosen.verbs == VerbsSettings("mlx5_0,^x", 2, 0, 31, 0, 104, 15, 8, 1)
    assert settings.read(dict.fromkeys((f"MDAS_IB_{name}" for name in given), "")).verbs == VerbsSettings()
    for transport in ("auto", "tcp", "verbs"):
        assert settings.read({}, transport=transport).transport == transport


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MDAS_IB_PORT", "0"),
        ("MDAS_IB_PORT", "256"),
        ("MDAS_IB_GID_INDEX", "256"),
        ("MDAS_IB_GID_INDEX", "-1"),
        ("MDAS_IB_TIMEOUT", "0"),
        ("MDAS_IB_TIMEOUT", "32"),
        ("MDAS_IB_RETRY_COUNT", "8"),
        ("MDAS_IB_TRAFFIC_CLASS", "0x68"),
        ("MDAS_IB_SERVICE_LEVEL", "16"),
        ("MDAS_IB_RAILS", "0"),
        ("MDAS_IB_RAILS", "9"),
        ("MDAS_IB_RELAXED_ORDERING", "2"),
        ("MDAS_TIMEOUT", "0"),
        ("MDAS_TIMEOUT", "-1"),
        ("MDAS_TIMEOUT", "inf"),
        ("MDAS_TIMEOUT", "soon"),
        ("MDAS_WARN_AFTER", "nan"),
        ("MDAS_TRANSPORT", "pigeons"),
        ("MDAS_PORT_RANGE", "9-1"),
        ("MDAS_PORT_RANGE", "1-70000"),
        ("MDAS_PORT_RANGE", "a-b"),
        ("MDAS_PROGRESS_CPUS", "x"),
        ("MDAS_SMALL_BYTES", "64k"),
        ("MDAS_SMALL_BYTES", str(2**63)),
        ("MDAS_SMALL_BYTES", "9" * 5000),
        ("MDAS_ALGORITHM", "telepathy"),
        ("MDAS_LOG", "loud"),
        ("MDAS_LOG", "warn,mdas_core=loud"),
        ("MDAS_TCP_RATE_LIMIT", str(2**32)),
        ("MDAS_TCP_RATE_LIMIT", "200mbit"),
        ("MDAS_DETERMINISTIC", "yes"),
    ],
)
def test_nonsense_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings.read({variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)


def test_algorithms_and_levels_that_exist_are_named() -> None:
    with pytest.raises(ConfigurationError, match="is not one of ring, tree, chain, exchange, direct"):
        settings.read({"MDAS_ALGORITHM": "telepathy"})
    with pytest.raises(ConfigurationError, match="is not one of off, error, warn, info, debug, trace"):
        settings.read({"MDAS_LOG": "loud"})
    for log in ("debug", "WARN", "warn,mdas_core::engine=debug"):
        assert settings.read({"MDAS_LOG": log}).log == log
