"""The documentation is true: its blocks run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.pages import run_page

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"integrations.md", "weights.md"}  # have tests of their own
PAGES = [*DOCS.glob("tutorial/*.md"), *(page for page in DOCS.glob("how-to/*.md") if page.name not in ELSEWHERE)]


@pytest.mark.parametrize("page", sorted(PAGES, key=lambda page: page.stat().st_size), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    assert jobs.in_a_process(run_page, page, tmp_path) == 0


def test_the_entry_pages_are_short() -> None:
    assert (DOCS.parent / "README.md").stat().st_size <= 10_240
    assert (DOCS.parent / "CONTRIBUTING.md").stat().st_size <= 4_096
