"""The pictures, tables and step numbers of docs/kv-cache.md are those of the runs that they are drawn from."""

import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

from kv_pictures import held, life, sharing  # noqa: E402
from make_kv_pictures import PICTURES  # noqa: E402

PAGE = (DOCS / "kv-cache.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 12  # pixels of a letter that can be read


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_is_that_of_a_fresh_run(file: str):
    stored = (DOCS / file).read_text(encoding="utf-8")
    assert stored == PICTURES[file](), "run python docs/make_kv_pictures.py"


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_needs_nothing_from_elsewhere_and_can_be_read(file: str):
    assert f"]({file})" in PAGE
    assert (DOCS / file).stat().st_size < 100_000
    root = ET.parse(DOCS / file).getroot()
    kinds = {"title", "desc", "rect", "polygon", "polyline", "path", "text"}
    assert {element.tag for element in root} <= {SVG + kind for kind in kinds}
    assert root[0].tag == SVG + "title" and root[1].tag == SVG + "desc"
    paper = root[2]
    assert [paper.get(side) for side in ("width", "height")] == [root.get(side) for side in ("width", "height")]
    assert min(int(text.get("font-size", 0)) for text in root.iter(SVG + "text")) >= SMALLEST


@pytest.mark.parametrize("table", [held.waste_table, held.scarcity_table])
def test_a_table_of_the_page_is_that_of_a_fresh_run(table):
    assert "\n\n" + "\n".join(table()) + "\n\n" in PAGE, "put in what python docs/make_kv_pictures.py prints"


def test_the_sums_of_the_page_are_those_of_the_workload_prefix():
    steps, stats = held.workload("prefix")
    entries = max(step.capacity for step in steps) // 16
    assert f"have up to {entries:,} entries together; they hold {stats.peak_blocks:,} blocks" in PAGE


def test_the_page_tells_the_life_of_the_pool_as_it_is():
    steps = life.life()
    gone = {
        (step, name)
        for step, (before, after) in enumerate(pairwise(steps), 1)
        for name in after.queue
        if name not in before.queue and any(table.name == name for table in before.tables)
    }
    assert gone == {(28, "D"), (44, "C"), (90, "C")}
    assert "D at step 28, and C at 44 and again, for a step, at 90" in PAGE
    waiting = [(step, table.name) for step, memory in enumerate(steps) for table in memory.tables if not table.rows]
    assert waiting == [(0, "B")] and "as B does for A at step 0" in PAGE
    back = next(table for table in steps[70].tables if table.name == "C")
    found = [block in steps[69].cached or steps[69].owners(block) == ("A", "B") for block in back.blocks]
    assert (found[:6], back.rows) == ([True] * 6, 49) and back.written == 6 * 16 + 49 and "At step 70" in PAGE
    assert "C finds the first six of its blocks and computes the other 49 of its tokens again" in PAGE
    begins = {(table.name, table.blocks[:2]) for memory in steps for table in memory.tables if table.blocks}
    assert {name for name, begin in begins if begin == (1, 2)} == set("ABCE")
    assert {name for name, begin in begins if begin != (1, 2)} == {"D"}


def test_the_panels_show_what_they_say():
    first, copied, found, whole = sharing.panels()
    owners = [[len(panel.memory.owners(block)) for block in (1, 2, 3)] for panel in (first, copied, found, whole)]
    assert owners == [[3, 3, 3], [3, 3, 1], [4, 4, 1], [5, 4, 1]]
    assert [table.rows for table in first.memory.tables] == [40, 0, 0]
    assert [source for source, _ in copied.memory.copies] == [3, 3] and not (first.memory.copies or found.memory.copies)
    assert found.memory.tables[-1].rows == 12
    last = whole.memory.tables[-1]
    assert (last.name, last.rows, last.written) == ("R", 1, 32)
    assert whole.memory.copies == ((2, last.blocks[1]),)
    assert [whole.writers[last.blocks[1], i] for i in (0, 14, 15)] == ["P1", "P1", "R"]
