"""Exposed communication on shaped links: mdas beside DDP over Gloo, in one run.

    python bench/overlap.py --hosts 2 4 --rate 1gbit --rounds 3

Both train the same model, whose passes sleep `--ratio` times mdas's pure exchange, as an accelerator
would leave the CPU free. For mdas, exposed is the time that ranks wait; for DDP, which does not tell,
it is what a step takes longer than under no_sync(). Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import netns


def ddp(mb: float, layers: int, bucket_mb: float, compute: float, iterations: int) -> None:
    """One rank of DDP over Gloo; rank 0 prints overall and local seconds per step."""
    import contextlib

    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from mdas.cli.sleeper import Sleeper

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(Sleeper(mb, layers, compute), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def steps(count: int, *, exchange: bool) -> float:
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            with contextlib.nullcontext() if exchange else model.no_sync():
                model().backward()
            optimizer.step()
        taken = torch.tensor([(time.perf_counter() - start) / count])
        distributed.all_reduce(taken, distributed.ReduceOp.MAX)
        return float(taken)

    steps(5, exchange=True)
    figures = {"overall": steps(iterations, exchange=True), "local": steps(iterations, exchange=False)}
    if distributed.get_rank() == 0:
        print(json.dumps(figures))
    distributed.destroy_process_group()


Row = dict[str, Any]


def measure(hosts: int, options: argparse.Namespace) -> list[list[Row]]:
    """Rows of one network, per round: mdas's benchmark, then DDP with the same compute time."""
    with netns.Network(hosts, options.rate) as network:
        return [once(network, options) for _ in range(options.rounds)]


def once(network: netns.Network, options: argparse.Namespace) -> list[Row]:
    """One round."""
    model = ["--layers", str(options.layers), "--bucket-mb", str(options.bucket_mb)]
    count = ["--iterations", str(options.iterations)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["-m", "mdas.cli", "bench", "overlap", "--mb", str(options.mb), "--ratio", str(options.ratio)]
        words += ["--predict", *options.predict, *model, *count, "--json", str(report)]
        network.run([sys.executable, *words], timeout=600)
        rows: list[Row] = json.loads(report.read_text())["rows"]
    compute, pure = rows[0]["compute_ms"], rows[0]["pure_ms"]
    words = [__file__, "--ddp", "--compute", str(compute / 1e3), "--mb", str(options.mb), *model, *count]
    printed = network.run([sys.executable, *words], timeout=600)
    figures = json.loads(printed[0].splitlines()[-1])
    overall, exposed = 1e3 * figures["overall"], 1e3 * (figures["overall"] - figures["local"])
    shares = {"overlap": max(0.0, 100 * (1 - exposed / pure)), "exposed": 100 * exposed / overall}
    return [*rows, {"what": "DDP over Gloo", "overall_ms": overall, "exposed_ms": exposed, **shares}]


def table(hosts: int, options: argparse.Namespace, rounds: list[list[Row]]) -> str:
    """In Markdown."""
    pure, compute = (median(rows[0][name] for rows in rounds) for name in ("pure_ms", "compute_ms"))
    lines = [
        (
            f"{hosts} hosts, links of {options.rate}, {options.mb:g} MiB of gradients, pure exchange "
            f"{pure:.0f} ms, compute {compute:.0f} ms ({len(rounds)} rounds)\n"
        ),
        "| | step, ms | exposed, ms | exposed, % of the step | overlap, % |",
        "|---|---:|---:|---:|---:|",
    ]
    for same in zip(*rounds, strict=True):
        columns = [("overall_ms", 0), ("exposed_ms", 1), ("exposed", 2), ("overlap", 1)]
        cells = [_spread([row[name] for row in same], digits) for name, digits in columns]
        lines.append(f"| {same[0]['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; or is one rank of DDP."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mb", type=float, default=32, help="MiB of gradients (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=4)
    parser.add_argument("--ratio", type=float, default=1.05)
    parser.add_argument("--predict", nargs="+", default=["blend", "sketch"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ddp:
        ddp(options.mb, options.layers, options.bucket_mb, options.compute, options.iterations)
        return 0
    results = {}
    for hosts in options.hosts:
        try:
            results[hosts] = measure(hosts, options)
        except netns.LabError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{table(hosts, options, results[hosts])}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
