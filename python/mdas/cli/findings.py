"""What `mdas doctor` finds: lines of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    value: str
    status: Literal["ok", "fail"] = "ok"
    """"fail": `init()` or a training would fail because of it."""
    note: str = ""
    """Why, or what to do."""


def table(findings: list[Finding]) -> str:
    """The findings in columns, a topic's name only where it begins."""
    columns = zip(*((f.topic, f.name, f.value) for f in findings), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for before, finding in zip([None, *findings], findings, strict=False):
        topic = "" if before is not None and before.topic == finding.topic else finding.topic
        cells = [text.ljust(width) for text, width in zip((topic, finding.name, finding.value), widths, strict=True)]
        failed = finding.status == "fail"
        lines.append(
            "  ".join(("FAIL" if failed else "    ", *cells, "see below" if failed else finding.note)).rstrip()
        )
    return "\n".join(lines)


def in_bytes(count: int) -> str:
    """65536 as 64 KiB."""
    amount, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and (larger := next(units, None)):
        amount, unit = amount / 1024, larger
    return f"{amount:.4g} {unit}"
