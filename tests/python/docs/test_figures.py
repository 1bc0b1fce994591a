"""Measured tables replace those between their marks, and nothing else."""

from __future__ import annotations

import pytest

from figures import README, TABLES, insert


def test_a_table_replaces_the_one_before() -> None:
    text = "above\n<!-- link -->\nold\nlines\n<!-- /link -->\nbelow <!-- demo -->\n"
    assert insert(text, "link", "| new |\n") == "above\n<!-- link -->\n| new |\n<!-- /link -->\nbelow <!-- demo -->\n"


def test_a_table_without_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no <!-- demo -->"):
        insert("<!-- demo -->", "demo", "| new |")


def test_the_readme_has_a_place_for_every_table() -> None:
    for name in TABLES:
        assert "| new |" in insert(README.read_text(), name, "| new |")
