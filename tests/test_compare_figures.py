"""The script that compares two files of figures: ratios, spreads that meet or not, and what cannot be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import script

compare = script("compare_figures")
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def spread(*values: float) -> dict[str, float]:
    return dict(zip(("least", "median", "most"), sorted(values), strict=True))


def bench(*speeds: float, **changed: Any) -> dict[str, Any]:
    """A result of a workload. changed: values by their path, a.b as a__b."""
    result: dict[str, Any] = {
        "tinyvllm_bench": 1,
        "commit": "c",
        "model": {"name": "m"},
        "config": {"hidden_size": 8, "num_layers": 2},
        "backend": {"device": "card", "dtype": "bfloat16"},
        "engine": {"slots": 4, "dtype": "bfloat16", "kv_dtype": "auto", "gpu_memory": 0.9},
        "workload": {"name": "mixed", "lengths_sha256": "l"},
        "start": None,
        "figures": {"tokens_per_s": spread(*speeds), "of_limit": spread(*(speed / 1000 for speed in speeds))},
    }
    for place, value in changed.items():
        *outer, last = place.split("__")
        target = result
        for key in outer:
            target = target[key]
        target[last] = value
    return result


def sweep(*speeds: float) -> dict[str, Any]:
    """A result of a sweep, a point for each speed."""
    result = bench(1, 1, 1)
    kept = {name: result[name] for name in ("commit", "model", "config", "backend", "engine")}
    points = [
        {
            "slots": 1 << i,
            "context": 512,
            "tokens_per_s": spread(speed, speed, speed),
            "of_limit": spread(0.5, 0.5, 0.5),
        }
        for i, speed in enumerate(speeds)
    ]
    return {"tinyvllm_sweep": 1, **kept, "points": points}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[Any, str, str]]:
    """Exit code, standard output and error for two results and options."""

    def call(before: Any, after: Any, *options: str) -> tuple[Any, str, str]:
        paths = []
        for name, result in (("before.json", before), ("after.json", after)):
            paths.append(str(result) if isinstance(result, Path) else str(tmp_path / name))
            if not isinstance(result, Path):
                (tmp_path / name).write_text(json.dumps(result))
        monkeypatch.setattr(sys, "argv", ["compare_figures", *paths, *options])
        try:
            compare.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def rows(out: str) -> dict[str, list[str]]:
    """Cells of each line of the table by the name of its figure."""
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((90, 100, 110), (99, 108, 120), "within the spread"),
        ((90, 100, 110), (111, 120, 130), "more"),
        ((90, 100, 110), (70, 80, 89), "less"),
        ((90, 100, 110), (110, 120, 130), "within the spread"),
    ],
)
def test_a_difference_counts_where_the_ranges_are_apart(run, before, after, verdict: str):
    code, out, _ = run(bench(*before), bench(*after))
    cells = rows(out)["tokens/s"]
    assert code == 0
    assert float(cells[2]) == pytest.approx(after[1] / before[1], abs=5e-4)
    assert cells[3].rstrip(" |") == verdict


@pytest.mark.parametrize(("percent", "code"), [("97", 1), ("95", 0), ("96", 0)])
def test_what_is_slower_than_allowed_fails(run, percent: str, code: int):
    assert run(bench(90, 100, 110), bench(86, 96, 106), "--fail-below", percent)[0] == code


def test_every_point_of_a_sweep_is_compared_and_may_fail(run):
    code, out, _ = run(sweep(100, 200, 400), sweep(100, 150, 400), "--fail-below", "90")
    assert code == 1
    assert [float(cells[2]) for name, cells in rows(out).items() if "tokens/s" in name] == [1, 0.75, 1]
    assert out.splitlines()[-1].endswith("2 slots, context 512: tokens/s")
    assert run(sweep(100, 200, 400), sweep(100, 200), "--fail-below", "90")[0] == 0, "only what both have"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (bench(1, 2, 3), bench(1, 2, 3, workload__lengths_sha256="other"), "workload.lengths_sha256 differs"),
        (bench(1, 2, 3), bench(1, 2, 3, engine__kv_dtype="fp8"), "engine.kv_dtype differs: auto before, fp8 after"),
        (bench(1, 2, 3), sweep(1), "one is a sweep"),
        (sweep(), sweep(), "no figure in common"),
        (bench(1, 2, 3), {"other": 1}, "is no result"),
        (bench(1, 2, 3), Path("/absent.json"), "cannot be read"),
        (bench(0, 2, 3), bench(1, 2, 3), "> 0"),
        (bench(1, 2, 3), bench(1, 2, 3, figures__tokens_per_s=None), "figures.tokens_per_s"),
        (bench(1, 2, 3), {"tinyvllm_bench": 1}, "after.json is no whole file of tinyvllm_bench"),
        (bench(1, 2, 3), bench(1, 2, 3, start={"first_s": None}), "start"),
        ({"tinyvllm_sweep": 1, "points": 5}, sweep(1), "points"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(run, before: Any, after: Any, message: str):
    code, _, error = run(before, after)
    assert code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_another_card_or_commit_is_said(run):
    _, out, _ = run(bench(1, 2, 3), bench(1, 2, 3, backend__device="other", commit="d"))
    assert "backend.device: card before, other after" in out and "commit: c before, d after" in out


def test_folders_are_compared_name_by_name(run, tmp_path: Path):
    folders = [tmp_path / name for name in ("old", "new")]
    for folder, speed in zip(folders, (100, 50), strict=True):
        folder.mkdir()
        for name in ("a.json", f"only-{folder.name}.json"):
            (folder / name).write_text(json.dumps(bench(speed, speed, speed)))
        (folder / "table.json").write_text('{"other": 1}')
    code, out, _ = run(*folders, "--fail-below", "90")
    assert code == 1
    assert out.count(" -> ") == 1 and "a.json" in out


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read"), ('{"other": 1}', "no .json file of figures")]
)
def test_a_folder_without_figures_to_compare_is_no_success(run, tmp_path: Path, content: str, message: str):
    (tmp_path / "a.json").write_text(content)
    code, _, error = run(tmp_path, tmp_path, "--fail-below", "90")
    assert code == 2
    assert message in error and error.count("\n") == 1


def test_the_kept_results_are_what_the_script_takes(run):
    code, out, _ = run(RESULTS, RESULTS, "--fail-below", "100")
    assert code == 0
    assert out.count(" -> ") >= 13
    assert {row.split(" | ")[3] for row in out.splitlines() if row.startswith("| tokens/s")} == {"1.000"}
