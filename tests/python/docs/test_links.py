"""Every link within the documentation leads somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from mdtext import ROOT, anchors, documents, links


def broken(document: Path, target: str) -> bool:
    """Does a link of this document lead nowhere?"""
    path, _, anchor = target.partition("#")
    goal = document.parent / path if path else document
    if not goal.exists():
        return True
    return bool(anchor) and anchor not in anchors(goal.read_text())


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_internal_links_resolve(document: Path) -> None:
    inside = [target for target in links(document.read_text()) if "://" not in target]
    assert [target for target in inside if broken(document, target)] == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# One thing, two\n[a](page.md#one-thing-two) [b](#three) [c](gone.md)\n```\n[d](no)\n```\n")
    assert [target for target in links(document.read_text()) if broken(document, target)] == ["#three", "gone.md"]
