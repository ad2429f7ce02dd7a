"""What docs/sampling.md shows is what a run gives."""

from pathlib import Path

from command import by_id, read_answers
from shell_blocks import run_block, shell_blocks
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.io.fields import ANSWER_FIELDS

PAGE = (Path(__file__).parent.parent / "docs" / "sampling.md").read_text()


def test_the_example_gives_what_the_page_says(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    (block,) = shell_blocks(PAGE)
    run = run_block(block, tmp_path, model)
    assert run.returncode == 0, run.stderr
    choices = {
        name: answer["choices"][0] for name, answer in by_id(read_answers(tmp_path / "colours.out.jsonl")).items()
    }
    assert choices["one"]["text"] == choices["other"]["text"] != choices["varied"]["text"]
    told = choices["sure"]["logprobs"]
    assert len(told) == 24
    assert all(
        token["id"] == token["top"][0]["id"] and token["logprob"] == token["top"][0]["logprob"] for token in told
    )
    assert all(token["top"][0]["logprob"] >= token["top"][1]["logprob"] for token in told)


def test_every_answer_field_has_its_line():
    told = {name for row in PAGE.splitlines() if row.startswith("| `") for name in row.split("|")[1].split("`")[1::2]}
    assert told >= ANSWER_FIELDS - {"logprobs"}
    assert "\n`logprobs: N` tells" in PAGE
