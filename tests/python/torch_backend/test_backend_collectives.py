"""What docs/torch-backend.md says of every operation, against reality: values as Gloo's, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import backend_checks
import pytest

from processes import run

PAGE = Path(__file__).parents[3] / "docs" / "torch-backend.md"


def table() -> dict[str, bool]:
    """Rows of the page's table: does it say that this can be done?"""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {cells[0].strip().strip("`"): {"yes": True, "no": False}[cells[1].strip()] for cells in rows}


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return [result.value for result in run(request.param, backend_checks.run_all, timeout=150)]


def test_the_page_has_a_row_for_every_check_and_no_other() -> None:
    assert table() == dict.fromkeys(backend_checks.ALLOWED, True) | dict.fromkeys(backend_checks.REFUSED, False)


@pytest.mark.parametrize("row", [*backend_checks.ALLOWED, *backend_checks.REFUSED])
def test_the_row_is_true(row: str, outcomes: list[dict[str, str]]) -> None:
    assert not any(outcome[row] for outcome in outcomes), "\n".join(outcome[row] for outcome in outcomes)
