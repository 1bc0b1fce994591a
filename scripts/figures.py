"""Puts measured tables into the README between their marks, and the demo's picture into docs/.

    make demo && python bench/link.py > bench/results/link.md && python scripts/figures.py

A table that has not been measured is left as it is.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DEMO = ROOT / "out" / "demo"
TABLES = {
    "demo": DEMO / "table.md",
    "convergence": ROOT / "bench" / "results" / "convergence.md",
    "link": ROOT / "bench" / "results" / "link.md",
    "overlap": ROOT / "bench" / "results" / "overlap.md",
}


def insert(text: str, name: str, table: str) -> str:
    """The text with the table between the name's marks.

    Raises:
        ValueError: the text has no such marks.
    """
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not marks.search(text):
        raise ValueError(f"no <!-- {name} --> ... <!-- /{name} --> in the text")
    return marks.sub(lambda match: f"{match[1]}{table.strip()}\n{match[2]}", text)


def main() -> int:
    """Inserts what there is."""
    text = README.read_text()
    for name, path in TABLES.items():
        if path.exists():
            text = insert(text, name, path.read_text())
            print(f"{name}: {path.relative_to(ROOT)}")
    README.write_text(text)
    if (DEMO / "demo.png").exists():
        (ROOT / "docs").mkdir(exist_ok=True)
        shutil.copy(DEMO / "demo.png", ROOT / "docs" / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
