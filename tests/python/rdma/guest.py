"""Runs in a virtual machine with an RDMA device: scenarios on each of two hosts, which are ranks 0 and 1.

    python guest.py SCENARIO...      each in a process of its own; writes $LAB_OUT/SCENARIO.json

A scenario returns what the tests look at. A torch-free one imports in seconds, torch takes minutes in here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from host import SCENARIOS, meet, mend
from scenarios import exchange, faults, groups, memory, programs

LIMIT = 300.0
LONGER = {"training": 900.0}
"""Seconds for a scenario."""
FILES = (exchange, faults, groups, memory, programs)
"""Where the scenarios are, which register themselves."""


def each(names: list[str], folder: Path) -> int:
    """Each scenario in a process of its own, which both hosts begin together."""
    status, limit = 0, LIMIT
    for name in names:
        meet(name, limit + 60)
        limit, start = LONGER.get(name, LIMIT), time.monotonic()
        with (folder / f"{name}.log").open("w") as log:
            try:
                words = [sys.executable, __file__, name]
                code = subprocess.run(words, stdout=log, stderr=log, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = 124
        print(f"{name}: {code} after {time.monotonic() - start:.0f} s", flush=True)
        mend()
        status = status or code
    return status


def main(names: list[str]) -> int:
    """One scenario here and now, or several."""
    folder = Path(os.environ["LAB_OUT"])
    if len(names) != 1:
        return each(names, folder)
    (folder / f"{names[0]}.json").write_text(json.dumps(SCENARIOS[names[0]](), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
