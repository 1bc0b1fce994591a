"""The ring over verbs beside perftest, in one run on the same two virtual machines with Soft-RoCE.

    python bench/rdma.py --mib 1 4 --rounds 3

Every round measures `ib_write_bw -b` (both directions at once; per direction it is half of that) and, with messages of
the same size, the ring's send rate per rank (2 (n - 1) / n * size / time, n = 2); and a 4-byte allreduce beside one
`ib_write_lat`. Figures are medians [smallest, largest]. It is an emulator: only the ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
MEBIBYTE = 1 << 20
PORT = 18515


def perftest(tool: str, *words: str) -> list[float]:
    """The numbers of its last line; host 0 serves."""
    command = [tool, "-d", "rxe0", "-x", "1", "-F", "-p", str(PORT), *words]
    if os.environ["LAB_HOST"] == "1":
        time.sleep(2)
        command.append(os.environ["LAB_PEER"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line[:1] == " " and line.split()[0].isdigit()]
    return [float(value) for value in rows[-1]]


def latency(iterations: int) -> float:
    """Seconds per allreduce of 4 bytes, one after the other."""
    import numpy as np

    import mdas

    array = np.ones(1, "float32")
    mdas.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        mdas.allreduce(array, op="max", lane="urgent")
    return (time.perf_counter() - start) / iterations


def send_rate(nbytes: int, iterations: int) -> float:
    """Bytes per second that a rank sends during allreduces, two in flight."""
    import numpy as np

    import mdas

    arrays = [np.ones(nbytes // 4, "float32") for _ in range(2)]
    flying = [mdas.allreduce(array, op="max", async_op=True) for array in arrays]
    for work in flying:
        work.wait()
    mdas.barrier()
    start = time.perf_counter()
    flying = [mdas.allreduce(array, op="max", async_op=True) for array in arrays]
    for index in range(2, iterations):
        flying.pop(0).wait()
        flying.append(mdas.allreduce(arrays[index % 2], op="max", async_op=True))
    for work in flying:
        work.wait()
    return nbytes * iterations / (time.perf_counter() - start)


def guest(mib: Sequence[float], rounds: int) -> None:
    """One host; writes $LAB_OUT/rounds.json."""
    import mdas

    host = os.environ["LAB_HOST"]
    os.environ.update(RANK=host, WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MDAS_ALGORITHM="")
    os.environ.update(MASTER_ADDR="192.0.2.1", MASTER_PORT="29500")
    found = []
    for _ in range(rounds):
        row: dict[str, float] = {}
        for size in mib:
            nbytes = int(size * MEBIBYTE)
            row[f"perftest {size:g}"] = perftest("ib_write_bw", "-b", "-s", str(nbytes), "-n", "40")[3] / 2
        row["perftest latency"] = perftest("ib_write_lat", "-s", "4", "-n", "400")[4]
        mdas.init(transport="verbs", timeout=60)
        for size in mib:
            nbytes = int(size * MEBIBYTE)
            row[f"mdas {size:g}"] = send_rate(nbytes, 30) / MEBIBYTE
        row["mdas latency"] = 1e6 * latency(200)
        mdas.shutdown()
        found.append(row)
        print(row, flush=True)
    (Path(os.environ["LAB_OUT"]) / "rounds.json").write_text(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Boots the machines, and prints; or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.guest:
        guest(options.mib, options.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = [str(ROOT / "tests/rdma/lab"), "--hosts", "2", "--cpus", "1", "--memory", "2G", "--limit", "1200"]
        words += ["--out", folder, "--", "env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, "-u"]
        words += [__file__, "--guest", "--rounds", str(options.rounds), "--mib", *map(str, options.mib)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=1300, cwd=ROOT, check=False)
        results = Path(folder) / "host0" / "rounds.json"
        if done.returncode != 0 or not results.exists():
            print(done.stdout, done.stderr, file=sys.stderr)
            return 1
        rounds = json.loads(results.read_text())
    print("| | perftest | mdas | ratio |\n|---|---:|---:|---:|")
    for size in options.mib:
        print(_row(f"{size:g} MiB, MiB/s per direction", rounds, f"perftest {size:g}", f"mdas {size:g}"))
    print(_row("4 bytes, us", rounds, "perftest latency", "mdas latency"))
    return 0


def _row(what: str, rounds: list[dict[str, float]], theirs: str, ours: str) -> str:
    ratios = [row[ours] / row[theirs] for row in rounds]
    cells = [f"{median(row[name] for row in rounds):.1f}" for name in (theirs, ours)]
    return f"| {what} | {' | '.join(cells)} | {median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] |"


if __name__ == "__main__":
    sys.exit(main())
