"""docs/structured-output.md: its blocks run, what it shows is what comes out, and its lists are those of the check."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
from command import by_id, read_answers, run_here
from constraint_tools import refused
from shell_blocks import run_block, shell_blocks
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.text.schema_check import ANNOTATIONS, FORMATS, KNOWN, UNENFORCED

PAGE = (Path(__file__).parent.parent / "docs" / "structured-output.md").read_text()
BLOCKS = shell_blocks(PAGE)
# Told in other words: identifiers of schemas, and old names.
UNTOLD = {"$anchor", "$recursiveAnchor", "$recursiveRef", "$dynamicAnchor", "$vocabulary", "minContains", "maxContains"}


# Not noticed, as the page says.
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


@pytest.fixture(scope="module")
def page_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder in which the blocks ran from top to bottom, and what each said."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not here")
    folder = tmp_path_factory.mktemp("page")
    model = make_tiny_model(folder / "model", chat_template=CHAT_TEMPLATE)
    said = []
    for block in BLOCKS:
        run = run_block(block, folder, model)
        assert run.returncode == 0, f"{block}\n{run.stderr}"
        said.append(run.stdout)
    return folder, said


def test_each_row_has_a_label(page_run: tuple[Path, list[str]]):
    rows = [line.split("\t") for line in page_run[1][0].splitlines()]
    assert [name for name, _ in rows] == ["r1", "r2", "r3"] and {label for _, label in rows} <= {" good", " bad"}


def test_the_probabilities_of_labels_are_those_of_their_scores(page_run: tuple[Path, list[str]]):
    folder, said = page_run
    scored = by_id(read_answers(folder / "label-scores.jsonl"))
    told = by_id([json.loads(line) for line in said[1].splitlines()])
    assert list(told) == list(scored) == ["r1", "r2", "r3"]
    for name, line in told.items():
        good, bad = (math.exp(score["logprob"]) for score in scored[name]["scores"])
        parts = {" good": pytest.approx(good / (good + bad)), " bad": pytest.approx(bad / (good + bad))}
        assert line == {"custom_id": name, **parts}
    contexts = [json.loads(line)["context"] for line in (folder / "to-score.jsonl").read_text().splitlines()]
    with (folder / "reviews.csv").open(newline="") as file:
        reviews = [row["review"] for row in csv.DictReader(file)]
    assert [context.split("Review: ")[-1] for context in contexts] == [f"{review}\nLabel:" for review in reviews]


def test_whole_answers_and_cut_ones_are_told_apart(page_run: tuple[Path, list[str]]):
    folder, said = page_run
    schema = json.loads((folder / "offer.json").read_text())
    whole = {line.pop("custom_id"): line for line in map(json.loads, said[2].splitlines())}
    cut = dict(map(json.loads, said[3].splitlines()))
    for value in whole.values():
        jsonschema.validate(value, schema)
    assert "chair" in cut and whole.keys() | cut.keys() == {"kettle", "lamp", "chair"}
    assert not whole.keys() & cut.keys() and whole


def test_the_forms_are_had_and_the_wrong_one_is_told(page_run: tuple[Path, list[str]]):
    folder, said = page_run
    told, message = said[4].splitlines()
    assert told == "exit code 3" and f"`{message}`" in PAGE
    answers = by_id(read_answers(folder / "forms.out.jsonl"))
    body = answers.pop("r1")["response"]["body"]
    assert json.loads(body["choices"][0]["message"]["content"])["colour"] in {"red", "blue"}
    texts = {name: answer["choices"][0]["text"] for name, answer in answers.items() if answer["choices"]}
    assert texts.keys() == {"choice", "regex", "grammar"} and texts["choice"] in {"one", "many"}
    assert re.fullmatch(r"19\d\d-\d\d-\d\d", texts["regex"])
    assert re.fullmatch(r"[1-9]\d? \+ [1-9]\d? = [1-9]\d?", texts["grammar"])


@pytest.mark.model
def test_the_answers_that_the_page_shows_are_those_of_a_run(default_model: Path, tmp_path: Path):
    files = dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", PAGE, re.DOTALL | re.MULTILINE))
    for name in "offers.jsonl", "offer.json":
        (tmp_path / name).write_text(files[name])
    out = tmp_path / "out"
    command = ["run", tmp_path / "offers.jsonl", "--json-schema", tmp_path / "offer.json", "-m", default_model]
    assert run_here(*command, "-o", out, "-q", "--backend", "cpu") == 0
    shown = [json.loads(line) for line in PAGE.splitlines() if line.startswith('{"custom_id":"')]
    ends = {name: answer["choices"][0] for name, answer in by_id(read_answers(out)).items()}
    assert ends.pop("chair")["finish_reason"] == "length"
    assert [{"custom_id": name} | json.loads(end["text"]) for name, end in sorted(ends.items())] == shown


def test_the_keywords_of_the_page_are_those_of_the_check():
    told = PAGE.split("\n## JSON Schema\n")[1].split("\n## ")[0]
    held, _, gone = told.partition("**Refused by name**")
    assert set(re.findall(r"`(\$?\w+)`", held)) >= KNOWN - ANNOTATIONS - UNTOLD - {"definitions"}
    assert set(re.findall(r"`(\$?\w+)`", gone)) >= UNENFORCED - UNTOLD - {"dependencies", "additionalItems"}
    assert set(re.findall(r"`([a-z0-9-]+)`", held)) >= set(FORMATS)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"regex": r"a\b"}, {"regex": r"^\p{L}(?i)x$"}),
        ({"regex": "a^b"}, {"regex": "a{2}|(?s).x"}),
        ({"regex": "(?=a)a"}, {"regex": r"[\[\]a-z]"}),
        ({"regex": r"(a)\1"}, {"regex": "(a)+?b"}),
        ({"regex": "[[:alpha:]]"}, {"regex": r"[^\n]{0,80}"}),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, {"json_schema": ENDLESS}),
        ({"regex": "[a&&b]"}, {"regex": r"[a\&\&b]"}),
        ({"grammar": 'start: "a" <|x|>'}, {"grammar": 'start: "a"{2,5} A?\nA: /x/ | "y"+'}),
        ({"grammar": "start: @other"}, {"grammar": '%import common.WORD\n%ignore " "\nstart: WORD'}),
        ({"grammar": "start[max_tokens=3]: /a*/"}, {"grammar": 'start: "a" %json {"type": "null"}'}),
        ({"grammar": '%llguidance {}\nstart: "a"'}, {"grammar": 'start: a*\na: "x"'}),
        ({"json_schema": {"nullable": True}}, {"json_schema": True}),
    ],
)
def test_the_dialects_are_as_the_page_says(wrong: dict[str, object], right: dict[str, object]):
    error = refused("bytes", **wrong)
    assert error is not None and error.type == "invalid_schema"
    assert refused("bytes", **right) is None
