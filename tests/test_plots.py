"""Pictures and tables of figures: what is drawn stands where its value belongs, and the page is what the files give."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import script

plots, charts, expect_tables, run_main = map(script, ("plots", "charts", "expect_tables", "run_main"))

SVG = "{http://www.w3.org/2000/svg}"
SLOTS, CONTEXTS = (1, 2, 4, 8), (512, 1024)
# tokens/s by context, a value for each number of slots; the second is one of the axis' own ticks.
SPEEDS = {512: (150.0, 500.0, 700.0, 1900.0), 1024: (110.0, 200.0, 1000.0, 1100.0)}
SHARES = {512: (0.2, 0.5, 0.6, 0.95), 1024: (0.1, 0.4, 0.8, 0.81)}


def spread(value: float) -> dict[str, float]:
    return {"median": value, "least": 0.9 * value, "most": 1.1 * value}


def engine(**changed: Any) -> dict[str, Any]:
    return {"dtype": "bfloat16", "kv_dtype": "auto", "gpu_memory": 0.9, "prefix_cache": True} | changed


def result(mark: str, **facts: Any) -> dict[str, Any]:
    backend = {"device": "a card", "dtype": "bfloat16"}
    return {
        mark: 1,
        "model": {"name": "random weights of llama-3.2-1b"},
        "backend": backend,
        "engine": engine(),
    } | facts


def sweep() -> dict[str, Any]:
    points = [
        {
            "slots": slots,
            "context": context,
            "tokens_per_s": spread(SPEEDS[context][i]),
            "of_limit": spread(SHARES[context][i]),
            "limit": {"tokens_per_s": SPEEDS[context][i] / SHARES[context][i]},
        }
        for context in CONTEXTS
        for i, slots in enumerate(SLOTS)
    ]
    return result("tinyvllm_sweep", points=points[::-1])


def bench(workload: str, speed: float, share: float, **changed: Any) -> dict[str, Any]:
    figures = {"tokens_per_s": spread(speed), "of_limit": spread(share)}
    facts = {"workload": {"name": workload}, "limit": {"tokens_per_s": speed / share}, "figures": figures}
    return result("tinyvllm_bench", **facts, engine=engine(**changed))


RESULTS = [
    bench("prefix", 300.0, 0.25),
    bench("latency", 1000.0, 0.5),
    bench("mixed", 4000.0, 0.8),
    bench("mixed", 5000.0, 0.6, dtype="float16", kv_dtype="fp8"),
    bench("mixed", 2000.0, 0.4, gpu_memory=3 << 30),
    bench("prefix", 60.0, 0.05, prefix_cache=False),
]
PEER = {"peer": "another", "tokens_per_s": {"llama-3.2-1b": {"latency": 500, "mixed": 6000}}}


def elements(picture: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(SVG + kind))


def places(polyline: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, point.split(","))) for point in polyline.get("points", "").split()]


def levels(picture: str) -> dict[str, list[float]]:
    """y of the words that stand at the left of an axis, which are four pixels below their line."""
    found: dict[str, list[float]] = {}
    for text in elements(picture, "text"):
        if text.get("text-anchor") == "end":
            found.setdefault(text.text or "", []).append(float(text.get("y", 0)) - 4)
    return found


def series(picture: str, colour: str) -> list[list[tuple[float, float]]]:
    """Whole lines of a colour: above tokens/s, below shares."""
    lines = [line for line in elements(picture, "polyline") if line.get("stroke") == colour]
    return [places(line) for line in lines if line.get("stroke-dasharray") is None]


@pytest.mark.parametrize(("context", "colour"), list(zip(CONTEXTS, charts.COLOURS, strict=False)))
def test_lines_stand_where_their_values_belong(context: int, colour: str):
    picture = plots.draw_sweep(sweep())
    for line, values in zip(series(picture, colour), (SPEEDS[context], SHARES[context]), strict=True):
        xs, ys = zip(*line, strict=True)
        steps = [after - before for before, after in pairwise(xs)]
        assert len(line) == len(SLOTS) and steps == pytest.approx([steps[0]] * 3, abs=0.11), "twice the slots, a step"
        assert steps[0] > 50
        order = sorted(range(len(SLOTS)), key=lambda i: values[i])
        assert sorted(range(len(SLOTS)), key=lambda i: -ys[i]) == order, "more stands higher"
    speeds, shares = series(picture, colour)
    at = levels(picture)
    for tick in (500, 1000, 200):
        for (_, y), value in zip(speeds, SPEEDS[context], strict=True):
            assert (abs(y - at[f"{tick:,}"][0]) < 0.11) == (value == tick)
    zero, whole = at["0 %"][-1], at["100 %"][-1]
    for (_, y), share in zip(shares, SHARES[context], strict=True):
        assert (zero - y) / (zero - whole) == pytest.approx(share, abs=1e-3)


def test_a_limit_is_dashed_above_what_was_reached():
    picture = plots.draw_sweep(sweep())
    for colour in charts.COLOURS[:2]:
        dashed = [
            places(line)
            for line in elements(picture, "polyline")
            if line.get("stroke") == colour and line.get("stroke-dasharray")
        ]
        for (x, y), (same_x, limit) in zip(series(picture, colour)[0], dashed[0], strict=True):
            assert x == same_x and limit < y


def test_axes_have_names_and_lines_have_contexts():
    words = [text.text or "" for text in elements(plots.draw_sweep(sweep()), "text")]
    assert [word for word in words if word.startswith("context ")] == ["context 512", "context 1,024"]
    assert any("tokens/s" in word for word in words) and sum("slots" in word for word in words) == 2
    assert [word for word in words if word in {"1", "2", "4", "8"}] == ["1", "2", "4", "8"] * 2


def test_bars_are_as_long_as_their_shares_and_a_peers_is_of_the_same_limit():
    picture = plots.draw_workloads(RESULTS, PEER)
    rects = [
        (each.get("fill"), float(each.get("height", 0)), float(each.get("width", 0)))
        for each in elements(picture, "rect")
    ]
    own = [width for fill, height, width in rects if (fill, height) == (charts.COLOURS[0], charts.BAR)]
    peers = [width for _, height, width in rects if height == charts.BESIDE and width != 12]
    unit = own[0] / 0.5
    assert own == pytest.approx([unit * share for share in (0.5, 0.8, 0.6, 0.25)], abs=0.11), "latency, mixed, prefix"
    assert peers == pytest.approx([unit * 500 / 2000, unit * 6000 / 5000], abs=0.11)
    words = [text.text for text in elements(picture, "text")]
    assert "mixed, dtype float16, kv-dtype fp8" in words and "80 %, 4,000 tokens/s" in words and "6,000" in words


@given(st.floats(1, 1e6), st.floats(1.01, 1e3))
def test_ticks_hold_all_values_and_little_more(low: float, more: float):
    ticks = charts.log_ticks(low, low * more)
    assert ticks[0] <= low < 2.5 * ticks[0] * (1 + 1e-9) and low * more <= ticks[-1]
    assert len(ticks) == 2 or ticks[-2] < low * more


@given(st.floats(1, 100), st.floats(1.1, 100), st.floats(0, 1))
def test_an_axis_goes_from_its_start_to_its_end(low: float, more: float, share: float):
    for log in (False, True):
        axis = charts.Axis(low, low * more, 90, 700, (), "", log=log)
        value = low * more**share if log else low + (low * more - low) * share
        assert axis.at(value) == pytest.approx(90 + 610 * share, abs=1e-4)


def test_options_stand_as_on_a_command_line_and_are_compared_with_none():
    lines = list(expect_tables.options_table(RESULTS))[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [(row[1], row[2], row[5]) for row in cells] == [
        ("mixed", "`--dtype float16 --kv-dtype fp8`", "1.25"),
        ("mixed", "`--gpu-memory 3.0GiB`", "0.50"),
        ("prefix", "`--no-prefix-cache`", "0.20"),
    ]


def test_a_sweep_is_a_table_of_slots_and_contexts():
    whole = sweep()
    whole["points"] = [each for each in whole["points"] if (each["slots"], each["context"]) != (8, 1024)]
    rows = list(expect_tables.sweep_table(whole))[2:]
    assert rows[0] == "| 1 | 150 (20 %) | 110 (10 %) |"
    assert rows[-1] == "| 8 | 1,900 (95 %) | does not fit |"


def test_the_cost_of_the_rule_is_a_line_for_each_workload_the_rule_first():
    def rates(*speeds: float) -> dict[str, Any]:
        names = ("rule", "free")
        each = zip(names, speeds, strict=True)
        return {name: {"tokens_per_s": spread(speed), "of_the_rule": speed / speeds[0]} for name, speed in each}

    cost = result("tinyvllm_row_invariance", workloads={"latency": rates(100, 90), "mixed": rates(1000, 1020)})
    head, _, *rows = expect_tables.invariance_table([sweep(), cost])
    assert head == "| shape | workload | rule | free |"
    assert [row.split(" | ")[1::2] for row in rows] == [
        ["latency", "90 (81 - 99), 0.900 |"],
        ["mixed", "1,020 (918 - 1,122), 1.020 |"],
    ]


def test_a_faster_card_has_a_higher_limit():
    """The first is the one that was measured: its own rates come back."""
    measured = {"rates": {"read": 4.5e12, "product": 7e14}}
    rows = [line.strip("| ").split(" | ") for line in list(expect_tables.cards_table(measured))[2:]]
    limits = {row[0]: [float(cell.replace(",", "")) for cell in row[1:]] for row in rows}
    for faster, slower in (("H200", "H100 SXM"), ("H100 SXM", "A100 80 GB SXM"), ("RTX 4090", "RTX 3090")):
        assert all(a > b for a, b in zip(limits[faster], limits[slower], strict=True))
    one = 2 * 1_235_746_816 + 2 * 16 * 2 * 8 * 64 * 1026  # weights; K and V of 1,025 tokens read, of one written
    assert limits["H200"][0] == pytest.approx(4.5e12 / one, abs=0.5)


def test_only_what_is_between_marks_is_replaced():
    page = "a\n<!-- x -->\nold <!-- y\n<!-- end -->\nb\n<!-- y -->\n<!-- end -->\nc\n"
    once = plots.filled(page, {"x": ["1", "2"], "y": ["3"], "absent": ["4"]})
    assert once == "a\n<!-- x -->\n\n1\n2\n\n<!-- end -->\nb\n<!-- y -->\n\n3\n\n<!-- end -->\nc\n"
    assert plots.filled(once, {"x": ["1", "2"], "y": ["3"]}) == once


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.json cannot be read"),
        ('{"tinyvllm_bench": 1}', "a.json is no whole file"),
        (json.dumps(bench("lines.jsonl", 100, 0.5)), "a.json is of the workload lines.jsonl"),
        ('{"other": 1}', "has no workload of llama-3.2-1b"),
        (None, "peer.json cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line_and_no_page_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
):
    results, peer = tmp_path / "results", tmp_path / "peer.json"
    results.mkdir()
    if content is not None:
        (results / "a.json").write_text(content)
        peer.write_text('{"peer": "p"}')
    for name, value in (("RESULTS", results), ("PEER", peer), ("DOCS", tmp_path), ("PAGE", tmp_path / "page.md")):
        monkeypatch.setattr(plots, name, value)
    with pytest.raises(SystemExit) as ended:
        run_main.run_main(plots.main)
    said = ended.value.code
    assert isinstance(said, str) and message in said and "\n" not in said
    assert not list(tmp_path.glob("*.svg")) and not plots.PAGE.exists()


def test_pictures_and_page_are_those_of_the_kept_files():
    results, peer = expect_tables.read_results(plots.RESULTS), json.loads(plots.PEER.read_bytes())
    for name, text in plots.pictures(results, peer):
        assert (plots.DOCS / name).read_text(encoding="utf-8") == text, "run python benchmarks/plots.py"
    page = Path(plots.PAGE).read_text(encoding="utf-8")
    found = plots.tables(results)
    assert plots.filled(page, found) == page, "run python benchmarks/plots.py"
    assert all(f"<!-- {name} -->" in page for name in found) and page.count("<!-- end -->") == len(found)
    assert all(f"]({name})" in page for name, _ in plots.pictures(results, peer))


def test_what_options_do_is_told_of_one_version_alone():
    """Another version's speed would count as the option's."""
    plain, option = bench("mixed", 4000.0, 0.8), bench("mixed", 5000.0, 0.6, kv_dtype="fp8")
    for commit, rows in (("a", 1), ("b", 0)):
        results = [plain | {"commit": "a"}, option | {"commit": commit}]
        assert len(list(expect_tables.options_table(results))) == 2 + rows
        assert len(expect_tables.workloads(results, "llama-3.2-1b")) == 1 + rows
