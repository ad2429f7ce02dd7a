"""Rows of .csv and .jsonl files: every row is a request or an error, and columns are data only."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from command import by_id, place_free, read_answers, run_apart, run_here, write_lines
from hypothesis import given
from hypothesis import strategies as st
from lines import json_values
from tiny import CHAT_TEMPLATE, byte_ids, make_tiny_model

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.csv_lines import read_csv_lines, read_header
from tinyvllm_cli.io.prompts import Defaults, Item, read_requests
from tinyvllm_cli.io.rows import Rows
from tinyvllm_cli.text.row_template import RowTemplate, no_column
from tinyvllm_cli.types import Completion, Request

pytestmark = pytest.mark.usefixtures("own_cache")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(str.strip)
cells = st.text(st.characters(codec="utf-8"), max_size=12)


def rows(template: str = "{{ row | tojson }}", *, is_csv: bool = False, **options: Any) -> Rows:
    return Rows(is_csv, (RowTemplate(template, lambda text, n: text[:n]),), **options)


def read(data: bytes, how: Rows) -> list[Item]:
    return list(read_requests(how.lines(io.BytesIO(data)), Defaults(), rows=how, check_ids=True))


def prompts(data: bytes, how: Rows) -> list[Any]:
    return [item.prompt if isinstance(item, Request) else item.error and item.error.type for item in read(data, how)]


@given(st.data())
def test_what_csv_wrote_is_read_back_cell_by_cell(data: st.DataObject):
    header = data.draw(st.lists(names, min_size=2, max_size=4, unique=True))
    table = data.draw(st.lists(st.lists(cells, min_size=len(header), max_size=len(header)), max_size=5))
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])))
    writer.writerows([header, *table])
    encoded = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.getvalue().encode()
    assert read_header(io.BytesIO(encoded), "in.csv") == header
    lines = list(read_csv_lines(io.BytesIO(encoded)))
    assert [json.loads(line.text) for line in lines] == [dict(zip(header, row, strict=True)) for row in table]
    assert [line.index for line in lines] == list(range(len(table)))
    starts = [1 + "".join(header).count("\n")]
    for row in table:
        starts.append(starts[-1] + 1 + "".join(row).count("\n"))
    assert [line.number for line in lines] == [start + 1 for start in starts[:-1]]


def test_a_bad_row_keeps_to_itself():
    data = b'a,b\n1,2\n1,2,3\nx\n\n"1"2,3\n\xe9,4\n"multi\nline",5\n""\n6,"open\n7,8\n'
    items = read(data, rows("{{ a }}-{{ b }}", is_csv=True))
    found = [(i.line, i.prompt if isinstance(i, Request) else i.error and i.error.type) for i in items]
    assert found == [
        (2, "1-2"),
        (3, "invalid_line"),
        (4, "invalid_line"),
        (6, "invalid_line"),
        (7, "invalid_encoding"),
        (8, "multi\nline-5"),
        (10, "invalid_line"),
        (11, "invalid_line"),
    ]


def test_a_cell_longer_than_pythons_own_limit_is_read():
    long = "x" * 300_000
    assert prompts(b"a\n" + long.encode() + b"\n", rows("{{ a }}", is_csv=True)) == [long]


@pytest.mark.parametrize(
    ("data", "said"), [(b"a,a\n1,2\n", "twice"), (b"\xe9,a\n", "UTF-8"), (b'"a"b\n', "header row is not CSV")]
)
def test_a_header_that_names_no_columns_is_refused(data: bytes, said: str):
    with pytest.raises(UsageError, match=said):
        read_header(io.BytesIO(data), "in.csv")


@given(st.dictionaries(names, json_values, min_size=1, max_size=4))
def test_columns_are_data_only_and_are_kept_as_they_are(row: dict[str, Any]):
    row = {**row, "max_tokens": 3, "raw": True, "custom_id": "it"}
    (item,) = read(json.dumps(row).encode(), rows(keep=("*",)))
    if isinstance(item, Completion):  # numbers beyond a double's range
        assert item.error is not None and item.error.type == "invalid_value"
        return
    assert item.params == Defaults().params and not item.raw and item.custom_id == "it"
    assert item.metadata_json is not None and json.loads(item.metadata_json) == row
    (few,) = read(json.dumps(row).encode(), rows(keep=("raw", "custom_id", "raw")))
    assert few.metadata_json == b'{"raw":true,"custom_id":"it"}'


def test_digits_of_kept_numbers_stay():
    (item,) = read(b'{"a": 1.10, "b": 12345678901234567890123}', rows("x", keep=("a", "b")))
    assert item.metadata_json == b'{"a":1.10,"b":12345678901234567890123}'


def test_ids_come_from_their_column_with_their_type():
    how = rows("x", id_column="key")
    items = read(b'{"key": 17}\n{"key": "17"}\n{"key": null}\n{"key": 1.5}\n{}\n{"key": 17}\n{"key": true}', how)
    assert [item.custom_id for item in items] == [17, "17", "line-3", "line-4", "line-5", 17, "line-7"]
    types = [item.error.type if isinstance(item, Completion) and item.error else None for item in items]
    assert types == [None, None, None, "invalid_value", "invalid_value", "duplicate_id", "invalid_value"]
    by_default = read(b"custom_id,a\n7,x\n,y\n", rows("{{ a }}", is_csv=True))
    assert [item.custom_id for item in by_default] == ["7", "line-3"]


@pytest.mark.parametrize("id_column", [None, "key"])
def test_a_row_with_a_cell_that_is_no_text_keeps_its_id_unless_that_is_it(id_column: str | None):
    name = id_column or "custom_id"
    data = f"a,{name},b\n".encode() + b"\xe9,x1,y\nx,x2,\xff\nx,\xe9,y\n\xe9,,y\nx,x5,y\n"
    items = read(data, rows("{{ a }}", is_csv=True, id_column=id_column))
    assert [item.custom_id for item in items] == ["x1", "x2", "line-4", "line-5", "x5"]
    errors = [isinstance(item, Completion) and item.error and item.error.message.split()[0] for item in items]
    assert errors == ["a", "b", name, "a", False]


def test_a_template_names_what_a_row_lacks():
    (item,) = read(b'{"question": 1}', rows("{{ qestion }}"))
    assert isinstance(item, Completion) and item.error is not None and item.error.type == "template_error"
    assert item.error.message.endswith("asks for the column qestion, which is not there: found question")
    assert prompts(b'{"a": {}}', rows("{{ a.b }}")) == ["template_error"]
    assert prompts(b'{"a": 1}', rows("{% if b is defined %}{{ b }}{% else %}none{% endif %}")) == ["none"]


# ---------------------------------------------------------------- a whole run

TABLE = 'id,city,note\nx1,"Paris, France",{{ 7 * 7 }}\nx2,Rome,<|im_end|>\n'


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    path.write_text(TABLE)
    return path


def test_rows_are_answered_as_the_same_prompts_are(tiny: Path, table: Path, tmp_path: Path):
    out, lines_out, options = tmp_path / "out.jsonl", tmp_path / "lines.out.jsonl", ("-m", tiny, "--max-tokens", "4")
    how = ("-t", "{{ city }}: {{ note }}\n", "--id", "id", "--keep", "*")
    assert run_here("run", table, *how, "-o", out, *options) == 0
    kept = [dict(zip(("id", "city", "note"), row, strict=True)) for row in list(csv.reader(TABLE.splitlines()))[1:]]
    lines = [{"custom_id": r["id"], "prompt": f"{r['city']}: {r['note']}\n", "metadata": r} for r in kept]
    assert run_here("run", write_lines(tmp_path / "lines.jsonl", lines), "-o", lines_out, *options) == 0
    wanted = {name: place_free(answer) for name, answer in by_id(read_answers(lines_out)).items()}
    assert {name: place_free(answer) for name, answer in by_id(read_answers(out)).items()} == wanted
    # JSON rows of the same table
    rows_in = write_lines(tmp_path / "rows.jsonl", kept)
    assert run_here("run", rows_in, *how, "-o", out, "--overwrite", *options) == 0
    assert {name: place_free(answer) for name, answer in by_id(read_answers(out)).items()} == wanted


def test_a_list_of_messages_is_rendered_message_by_message(table: Path, tmp_path: Path):
    from tinyvllm_cli.io.rows import read_rows
    from tinyvllm_cli.io.settings import read_text_option
    from tinyvllm_cli.io.source import open_source

    shots = tmp_path / "shots.json"
    turns = [("developer", "Be {{ 1 + 1 }} brief"), ("user", "Bonn?"), ("assistant", "DE"), ("user", "{{ city }}?")]
    shots.write_text(json.dumps([{"role": role, "content": content} for role, content in turns]))
    option, source = read_text_option("--template", f"@{shots}"), open_source(str(table))
    with source.stream:
        how = read_rows(source, option, "id", (), raw=False)
        assert how is not None
        first, second = read_requests(how.lines(source.stream), Defaults(), rows=how)
    assert isinstance(first, Request) and isinstance(second, Request) and first.messages and second.messages
    assert [(m.role, m.content) for m in first.messages] == [
        ("system", "Be 2 brief"), ("user", "Bonn?"), ("assistant", "DE"), ("user", "Paris, France?")
    ]  # fmt: skip
    assert first.messages[:3] == second.messages[:3] and second.messages[3].content == "Rome?"


def test_rows_on_standard_input_and_texts_cut_by_the_models_own_tokens(tiny: Path):
    data = b'{"custom_id": 1, "a": "\xe6\x97\xa5\xe6\x9c\xac"}\n{"custom_id": 1, "a": ""}\n{"b": 1}\n'
    ended = run_apart("run", "-", "-m", tiny, "-t", "{{ a | truncate_tokens(5) }}!", "--max-tokens", "2", stdin=data)
    assert ended.returncode == 3 and b"Traceback" not in ended.stderr
    answers = sorted(read_answers(ended.stdout), key=lambda answer: answer["index"])
    assert [a["error"] and a["error"]["type"] for a in answers] == [None, "duplicate_id", "template_error"]
    assert answers[0]["usage"]["prompt_tokens"] == 1 + 3 + 1  # BOS, one whole character of three bytes, !


def test_of_very_many_columns_those_like_the_one_that_is_missed_are_shown_first():
    others = [f"x{i}" for i in range(100)]
    shown = no_column("--id", "reveiw", [*others, "review"]).partition("found ")[2].split(", ")
    assert shown == ["review", *others[:19], "..."]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "needs --template"),
        (("--id", "city"), "needs --template"),
        (("-t", "{{ ciy }}"), "the column ciy, which is not there: found city, id, note\n"),
        (("-t", "{{ city"), "not valid Jinja"),
        (("-t", "{{ city }}", "--id", "key"), "--id asks for the column key"),
        (("-t", "{{ city }}", "--keep", "notes"), "found note, id, city\n"),
        (("-t", "{{ city }}", "--id", "city_id"), "found city, id, note\n"),
        (("-t", "city.txt"), "uses no column"),
        (("-t", "@missing.txt"), "cannot read missing.txt"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model(
    table: Path, tmp_path: Path, options: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.jsonl"
    assert run_here("run", table, "-m", tmp_path / "no-model", "-o", out, *options) == 2
    assert said in capfd.readouterr().err and not out.exists()


def test_equal_ids_of_rows_are_refused_with_both_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "in.csv"
    path.write_text('k,a\n1,"x\ny"\n2,z\n1,w\n')
    assert run_here("run", path, "-m", tmp_path / "no-model", "-t", "{{ a }}", "--id", "k") == 2
    assert "lines 2 and 5" in capfd.readouterr().err


# ---------------------------------------------------------------- --truncate left, --dry-run


@pytest.mark.parametrize(("max_tokens", "kept"), [(4, 28), (20, 16), (0, 31), (512, 16)])
def test_long_plain_prompts_are_cut_at_the_left_and_say_by_how_much(
    tiny: Path, tmp_path: Path, max_tokens: int, kept: int
):
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    short = {"max_tokens": max_tokens, "ignore_eos": True}
    tail = text[len(text) - (kept - 1) :]
    lines = [
        {"custom_id": "long", "prompt": text, **short},
        {"custom_id": "cut", "prompt": tail, **short},
        {"custom_id": "ids", "prompt_token_ids": byte_ids(text), **short},
        {"custom_id": "short", "prompt": "abc", **short},
    ]
    source, out, options = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", ("--max-model-len", "32")
    assert run_here("run", source, "-m", tiny, "-o", out, *options) == 3
    failed = {name: a["error"] for name, a in by_id(read_answers(out)).items() if a["error"]}
    assert {name: e["type"] for name, e in failed.items()} == dict.fromkeys(("long", "ids"), "prompt_too_long")
    assert run_here("run", source, "-m", tiny, "-o", out, "--overwrite", "--truncate", "left", *options) == 0
    found = by_id(read_answers(out))
    assert found["long"]["choices"] == found["cut"]["choices"] and found["long"]["usage"] == found["cut"]["usage"]
    assert found["long"]["usage"]["prompt_tokens"] == found["ids"]["usage"]["prompt_tokens"] == kept
    cut = {name: answer.get("truncated_tokens") for name, answer in found.items()}
    assert cut == {"long": 1 + len(text) - kept, "cut": None, "ids": len(text) - kept, "short": None}


def test_what_a_chat_template_stands_around_is_never_cut(tmp_path: Path):
    chat = make_tiny_model(tmp_path / "chat", chat_template=CHAT_TEMPLATE)
    prompt = "abcdefgh" * 8
    lines = [{"prompt": prompt}, {"messages": [{"role": "user", "content": prompt}]}, {"prompt": prompt, "raw": True}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ("--max-model-len", "64", "--max-tokens", "2", "--truncate", "left")
    assert run_here("run", source, "-m", chat, "-o", out, *options) == 3
    found = by_id(read_answers(out))
    types = [found[f"line-{i}"]["error"] and found[f"line-{i}"]["error"]["type"] for i in (1, 2, 3)]
    assert types == ["prompt_too_long", "prompt_too_long", None]


def test_a_dry_run_foretells_the_run(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines: list[Any] = [{"prompt": "a" * n, "max_tokens": 5, "ignore_eos": True} for n in (3, 9, 4, 50)]
    lines += [[], {"prompt": "x", "max_token": 1}, {"prompt": "bc", "max_tokens": 100, "n": 2, "temperature": 1}]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    options = ("-m", tiny, "--max-model-len", "32", "-o", out)
    assert run_here("run", source, *options, "--dry-run") == 3
    said = capfd.readouterr()
    assert said.out == "" and not out.exists() and list(tmp_path.iterdir()) == [source]
    assert run_here("run", source, *options) == 3
    answers = read_answers(out)
    foretold = [line for line in said.err.splitlines() if line.startswith("line ")]
    failed = sorted((a["error"]["line"], a["error"]) for a in answers if a["error"])
    assert foretold == [f"line {number}: {error['type']}: {error['message']}" for number, error in failed]
    lengths = sorted(a["usage"]["prompt_tokens"] for a in answers if a["usage"])
    assert f"{len(lengths)} would be answered, {len(failed)} would fail" in said.err
    assert f"{sum(lengths)} tokens; least {lengths[0]}, median 4.5, most {lengths[-1]}" in said.err
    assert lengths[1] + lengths[2] == 9
    assert f"at most {3 * 5 + 2 * (32 - 3)} tokens" in said.err


def test_a_dry_run_reads_no_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tinyvllm_cli import load

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a device was opened")

    monkeypatch.setattr(load, "open_backend", refuse)
    monkeypatch.setattr(load, "choose_backend", refuse)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert run_here("run", source, "-m", tiny, "--dry-run") == 0


def test_what_people_often_have_in_the_place_of_a_table_is_named(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    for separator in ";\t|":
        (tmp_path / "in.csv").write_text(separator.join(["id", "text"]) + "\n" + separator.join(["1", "x"]) + "\n")
        assert run_here("run", tmp_path / "in.csv", "-m", tiny, "-t", "{{ text }}") == 2
        assert "columns are separated by commas" in capfd.readouterr().err
    (tmp_path / "in.csv").write_text("stars\n3\n")
    out = tmp_path / "out.csv"
    assert run_here("run", tmp_path / "in.csv", "-m", tiny, "-t", "{% if stars > 2 %}x{% endif %}", "-o", out) == 3
    assert "these columns are texts" in read_answers(out)[0]["error"]["message"]
    assert "out.csv will hold JSON lines" in capfd.readouterr().err
    (tmp_path / "in.jsonl").write_text('[\n{"stars": 3},\n{"stars": 2}]\n')
    assert run_here("run", tmp_path / "in.jsonl", "-m", tiny, "-t", "{{ stars }}", "--dry-run") == 3
    assert "makes lines of a whole array" in capfd.readouterr().err


def test_a_table_of_very_many_columns_is_read_as_fast_as_one_of_few(tmp_path: Path, tiny: Path, capfd: Any):
    (tmp_path / "in.csv").write_text(",".join(f"c{i}" for i in range(100_000)) + "\n")
    assert run_here("run", tmp_path / "in.csv", "-m", tiny, "-t", "{{ zz }}") == 2
    said = capfd.readouterr().err
    assert "found c0, c1, " in said and len(said) < 1000


def test_a_dry_run_refuses_the_context_that_the_run_refuses(table: Path, tiny: Path, capfd: Any):
    for more in ((), ("--dry-run",)):
        assert run_here("run", table, "-m", tiny, "-t", "{{ city }}", "--max-model-len", "4097", *more) == 2
        assert "is more than the model's context, at most 4096" in capfd.readouterr().err


def test_the_mark_of_utf8_at_the_start_of_a_template_is_no_part_of_it(table: Path, tmp_path: Path):
    from tinyvllm_cli.io.settings import read_text_option

    for name, content in (("t.txt", "{{ city }}"), ("t.json", '[{"role": "user", "content": "x"}]')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        option = read_text_option("--template", f"@{tmp_path / name}")
        assert option is not None and option.text == content
