"""RDMA on a real device of the kernel: two virtual machines with Soft-RoCE (see tests/rdma).

All scenarios run in one pair of machines; each test looks at what one of them has found.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(2700)

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SCENARIOS = ["exactness", "mixed", "rails", "device_tests", "foreign_peer"]
SCENARIOS += ["zero_copy", "registrations", "read_only", "held", "broken_groups", "broken_groups_of_three", "forks"]
SCENARIOS += ["loss", "families", "killed", "stopped", "link_down", "port_flaps", "memlock", "doctor", "training"]
NOTHING = {"completion_queues": 0, "contexts": 0, "memory_regions": 0, "protection_domains": 0, "queue_pairs": 0}


def device_tests():
    """The program with the core's unit tests, built if need be."""
    words = ["cargo", "test", "--no-run", "--message-format=json", "--locked", "-p", "mdas-core", "--lib"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    artifacts = (json.loads(line) for line in done.stdout.splitlines())
    (program,) = {artifact["executable"] for artifact in artifacts if artifact.get("executable")}
    return program


def _tail(file):
    text = file.read_text(errors="replace") if file.exists() else "(not there)"
    return "\n".join([f"-- {file.parent.name}/{file.name}", *text.splitlines()[-40:]])


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """What every scenario has found: `lab(name)` gives the results of both hosts."""
    missing = [tool for tool in ("qemu-system-x86_64", "busybox", "rdma", "cpio") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"the RDMA laboratory needs root and {', '.join(missing) or 'nothing else'} (make setup)")
    out = tmp_path_factory.mktemp("lab")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    variables = [f"MDAS_DEVICE_TESTS={device_tests()}"]
    variables += [f"PYTHONPATH={environment['PYTHONPATH']}"] if "PYTHONPATH" in environment else []
    words = [ROOT / "tests/rdma/lab", "--hosts", "2", "--nics", "2", "--cpus", "1", "--memory", "3G"]
    words += ["--limit", "2400", "--out", out, "--", "env", *variables]
    words += [sys.executable, "-u", HERE / "guest.py", *SCENARIOS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2500, cwd=ROOT, check=False)

    def found(name):
        hosts = [out / f"host{host}" for host in (0, 1)]
        if not all((host / f"{name}.json").exists() for host in hosts):
            logs = [_tail(host / file) for host in hosts for file in (f"{name}.log", "console.log")]
            pytest.fail("\n".join([f"{name} has no result; the laboratory:", done.stdout, done.stderr, *logs]))
        return [json.loads((host / f"{name}.json").read_text()) for host in hosts]

    return found


def test_every_operation_gives_the_bits_that_tcp_gives(lab):
    ours, theirs = lab("exactness")
    for digests in (ours["digests"], theirs["digests"]):
        for first, tcp, again in digests.values():
            assert len(first) == 24
            assert first == tcp == again
    # Ring and tree add up in different orders, which two ranks cannot tell; and all is the same on both.
    assert set(ours["digests"]) == {"auto", "ring", "tree"}


def test_nothing_is_left_of_a_job(lab):
    for host in lab("exactness"):
        first, *others = host["left"]
        assert len(others) == 9
        for left in others:
            assert left == first
            assert left["verbs"] == NOTHING


def test_nothing_is_left_of_a_job_whose_handles_are_held(lab):
    for host in lab("held"):
        assert host["exact"] == [True] * 4
        first, *others = host["left"]
        assert first["verbs"] == NOTHING
        assert others == [first] * 3


def test_a_rank_without_rdma_is_reached_over_tcp_and_the_others_over_verbs(lab):
    ours, theirs = lab("mixed")
    assert ours == theirs
    assert ours["transport"] == "mixed"
    assert ours["queue pairs"] == 2
    assert ours["digests"][0] == ours["digests"][1]
    assert ours["left"]["verbs"] == NOTHING


def test_two_rails_carry_the_same_bits_and_about_as_much_each(lab):
    for result in lab("rails"):
        first, tcp, again = result["digests"]
        assert first == tcp == again
        assert result["exact"] == [True, True, True]
        for one, both in enumerate(result["packets"]):
            few, many = sorted(both.values())
            assert set(both) == {"rxe0", "rxe1"}
            assert many == 0 if one == 1 else few > 0.5 * many > 500
        assert result["fewer"] == 2.0
        assert result["fewer packets"]["rxe1"] == 0 < result["fewer packets"]["rxe0"]
        assert [left["verbs"] for left in result["left"]] == [NOTHING] * 4
        assert result["left"][1:] == result["left"][:1] * 3
    ours, theirs = lab("rails")
    assert ours["digests"] == theirs["digests"]


def test_the_transport_by_itself_on_the_device(lab):
    for result in lab("device_tests"):
        assert result["status"] == 0, result["text"]
        (passed,) = re.findall(r"test result: ok\. (\d+) passed; 0 failed; 0 ignored", result["text"])
        assert int(passed) == 6


def test_a_program_over_pyverbs_writes_to_the_transport_and_is_written_to(lab):
    words = ["/usr/bin/python3", "-c", "import pyverbs.qp"]
    if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode != 0:
        pytest.skip("no pyverbs for /usr/bin/python3 (Debian: python3-pyverbs; make setup)")
    for result in lab("foreign_peer"):
        assert result["status"] == 0, result["text"]
        assert "test result: ok. 1 passed" in result["text"]


def test_a_registered_bucket_is_never_copied(lab):
    assert lab("zero_copy") == [{"copied": 0}, {"copied": 0}]


def test_a_group_that_breaks_in_mid_flight_costs_no_connection(lab):
    for scenario, turns in (("broken_groups", 24), ("broken_groups_of_three", 12)):
        for host in lab(scenario):
            assert host["kinds"] == (["MismatchError"] * 3 + ["CollectiveTimeoutError"]) * (turns // 4)
            assert host["exact"]
            assert host["untouched"]
            assert host["left"]["verbs"] == NOTHING


def test_an_array_is_registered_once_and_what_takes_its_place_anew(lab):
    for host in lab("registrations"):
        for name in ("float32", "float16"):
            assert host[name] == [1, 0, 0, 0]
            assert host[f"{name} value"] == 16.0
            assert host[f"{name} part"] == [0, 0, 0, 0]
            assert host[f"{name} out"] == [1, 0, 0, 0]
        assert host["bytearray"] == [1, 1, 1, 1]
        assert host["large"] == [1, 0]
        assert host["registered"] == 1
        assert host["deregistered"]
        for name in ("first", "second"):
            assert host[f"{name} at the same place"]
            assert host[f"{name} counted"] == [1]
            assert host[f"{name} value"]
        assert "cannot resize" in host["resize"]
        assert host["resized"] == [1]
        assert host["kept"] > 1
        assert host["left"]["verbs"] == NOTHING
        assert host["again"]


def test_an_input_that_is_mapped_for_reading_only_is_copied(lab):
    for host in lab("read_only"):
        assert host["exact"] == [True] * 8
        assert host["copied"] == [1_200_000, 1_200_000, 0, 0]
        assert host["log"].count("its input is copied, since verbs: registering memory: ibv_reg_mr on rxe0") == 4
        assert host["left"]["verbs"] == NOTHING


def test_forked_children_live_and_are_told_that_mdas_stayed_behind(lab):
    for host in lab("forks"):
        assert host == {"ended": [7 << 8, 0], "exact": True}


def test_lost_packets_change_nothing(lab):
    for host in lab("loss"):
        assert host == {"1": True, "5": True}


def test_gids_of_different_families_are_no_connection_and_link_local_ones_are(lab):
    differ = "do not understand each other: rank 0: RoCE v2 over IPv4; rank 1: RoCE v2 over link-local IPv6"
    for host in lab("families"):
        assert differ in host["error"]
        assert host["used"] == ["tcp", "verbs"]
        assert host["sums"] == [2.0, 2.0]
    ours, theirs = lab("families")
    assert f"over tcp: not verbs, since they {differ}" in ours["log"]
    assert "is link-local and reaches only peers on the same Ethernet" in theirs["log"]


def test_a_killed_peer_is_lost_at_once_and_a_new_job_works(lab):
    ours, theirs = lab("killed")
    assert "lost rank 1" in ours["error"]
    assert ours["seconds"] < 15
    for host in (ours, theirs):
        assert host["again"] == 2.0
        assert host["after"]["verbs"] == NOTHING
    assert ours["left"]["verbs"] == NOTHING
    assert ours["after"] == ours["left"]


def test_a_stopped_peer_is_lost_when_the_timeout_is_over_without_waiting_for_it_to_let_go(lab):
    ours, theirs = lab("stopped")
    assert ours["kind"] == "PeerLostError"
    assert "lost rank 1: it gave no sign of life" in ours["error"]
    assert 3 < ours["seconds"] < 5.5  # 6 if it were waited for as one that answers
    assert ours["left"]["verbs"] == theirs["left"]["verbs"] == NOTHING


def test_a_link_that_goes_down_is_an_error_on_both_sides_and_a_new_job_works(lab):
    for host, result in enumerate(lab("link_down")):
        assert result["kind"] == "PeerLostError"
        assert f"lost rank {1 - host}" in result["error"]
        assert result["seconds"] < 90
        assert result["again"] == 2.0
        assert result["left"]["verbs"] == result["after"]["verbs"] == NOTHING
        assert result["left"] == result["after"]
    assert "on rxe0 port 1" in "".join(result["error"] for result in lab("link_down"))


def test_a_port_that_comes_back_in_time_is_borne_and_logged(lab):
    ours, theirs = lab("port_flaps")
    for host in (ours, theirs):
        assert host["exact"]
        assert host["left"]["verbs"] == NOTHING
    assert "verbs: rxe0 port 1 is down" in theirs["log"]
    assert "verbs: rxe0 port 1 is active" in theirs["log"]


def test_too_little_lockable_memory_is_named(lab):
    for host in lab("memlock"):
        assert host["verbs"].startswith("ConfigurationError")
        assert "64 KiB" in host["verbs"]
        assert "memlock" in host["verbs"]
        assert host["tcp"] == "sum 2.0"


def test_doctor_shows_the_device_and_what_would_be_chosen(lab):
    for host, result in enumerate(lab("doctor")):
        assert re.search(rf"rxe0 port 1 GID 1 +::ffff:192.0.2.{host + 1} +RoCE v2", result["text"])
        assert re.search(r"choice +rxe0 port 1 GID 1 ", result["text"])
        assert result["status"] == 0


def test_the_example_ends_with_the_weights_that_it_has_over_tcp(lab):
    ours, theirs = lab("training")
    assert "Fashion-MNIST" in ours["source"]
    assert ours == theirs
    assert ours["verbs"] == ours["tcp"]
    assert ours["verbs steps"] == ours["tcp steps"] == 50
