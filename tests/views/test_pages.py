"""Pages without a browser: what is refused in one line, and what no text in them may do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from checkflow.cli import planning
from checkflow.cli.main import FAILED, FOUND, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.errors import ViewError
from checkflow.planner.schedule.compare import compare_plan
from checkflow.views import page
from checkflow.views.comparison import comparison_page, names_of
from checkflow.views.page import Chart, Fact, Facts, Table, Words, render
from tests.support.html.page_data import HOSTILE, make_page_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    plans.save(make_page_plan(), file)
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "PLAN"],
        ["compare", "gpt2"],
        ["report", "no/such/directory"],
        ["simulate", "gpt2", "--mtbf", "1h", "--storage", "1GB/s"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_without_plotly_one_line_says_how_to_get_it(
    arguments: list[str],
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(planning, "planner_for", None)  # it is said before any planning
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    real = [str(plan_file) if one == "PLAN" else one for one in arguments]
    assert main([*real, "--html", str(tmp_path / "page.html")]) == FAILED
    told = capsys.readouterr()
    assert told.err == "checkflow: pages need plotly, which is not installed: pip install 'checkflow[html]'\n"
    assert told.out == ""
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "PLAN", "--html", "TMP/no/page.html"], FAILED, "cannot write the page to TMP/no/page.html: No such"),
        (["compare", "PLAN", "--html", "TMP/no/page.html"], FAILED, "cannot write the page to TMP/no/page.html: No "),
        (["show", "PLAN", "--html", "TMP"], FAILED, "cannot write the page to TMP: Is a directory"),
        (["report", "TMP", "--html", "TMP/page.html"], FAILED, "cannot read the report TMP/report.json: No such file"),
        (["report", "PLAN"], FAILED, "PLAN is no run report: "),
        (["compare", "REPORT", "--html", "TMP/page.html"], USAGE, "checkflow report DIRECTORY --html FILE"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    arguments: list[str], code: int, says: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "folder" / "report.json"
    report.parent.mkdir()
    report.write_text('{"format": "checkflow-report", "version": 1, "runs": []}')

    def real(text: str) -> str:
        return text.replace("TMP", str(tmp_path)).replace("PLAN", str(plan_file)).replace("REPORT", str(report))

    assert main([real(argument) for argument in arguments]) == code
    told = capsys.readouterr()
    assert real(says) in told.err
    assert told.err.count("\n") == 1
    assert bool(told.out) == ("cannot write" in says)  # the answer is not lost
    assert not (tmp_path / "page.html").exists()


def test_json_goes_on_beside_a_page(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_file), "--json"]) == FOUND
    alone = capsys.readouterr().out
    assert main(["show", str(plan_file), "--html", str(tmp_path / "page.html"), "--json"]) == FOUND
    assert capsys.readouterr().out == alone
    assert (tmp_path / "page.html").stat().st_size > 10**6


def test_no_text_becomes_a_tag() -> None:
    parts = [
        Facts((Fact("name", HOSTILE, HOSTILE, HOSTILE, HOSTILE + '"'),)),
        Table(HOSTILE, (HOSTILE, "b"), [[HOSTILE, HOSTILE]], HOSTILE),
        Words(HOSTILE, [HOSTILE]),
        Chart("chart", HOSTILE, [{"type": "bar", "x": [HOSTILE], "hovertext": [page.label(HOSTILE)]}], words=HOSTILE),
    ]
    whole = render(HOSTILE, HOSTILE, parts)
    without = whole.replace(page._plotly(), "")
    assert "<b>&amp;" not in without
    assert without.count("</script>") == 3
    assert "\x1b" not in without
    assert re.search(r'data-value="[^"]*&quot;"', without)


def test_a_page_may_load_nothing() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', render("a", "b", []))
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "http" not in policy[1]


def test_a_script_that_would_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from plotly import offline

    page._plotly.cache_clear()
    monkeypatch.setattr(offline, "get_plotlyjs", lambda: "var a = '</SCRIPT>'")
    with pytest.raises(ViewError, match="end of a script"):
        render("a", "b", [])
    page._plotly.cache_clear()


def test_no_two_subjects_of_a_comparison_have_one_name() -> None:
    rows = [
        compare_plan("a", make_page_plan()),
        compare_plan("b", make_page_plan()),
        compare_plan("c", make_page_plan(8e9)),
        compare_plan("d", make_page_plan(8e9, model="other")),
    ]
    names = names_of(rows)
    assert len(set(names)) == 4
    assert names[2] == "sample, 8.00 GB/s"
    assert names_of(rows[:1]) == ["sample"]


def test_names_that_a_chart_must_cut_to_one_text_have_bars_of_their_own() -> None:
    rows = [compare_plan("", make_page_plan(model="a" * 50 + middle + "z" * 50)) for middle in "xy"]
    assert len({page.label(name, 60) for name in names_of(rows)}) == 1
    found = re.search(r'id="charts">(.*?)</script>', comparison_page(rows), re.DOTALL)
    assert found is not None
    for chart in json.loads(found[1]):
        axis = chart["layout"]["xaxis"]
        assert len(set(axis["tickvals"])) == len(axis["ticktext"]) == 2
        assert [trace["x"] for trace in chart["data"]] == [axis["tickvals"]] * 5
