"""`tinyvllm doctor`: a line for each check, the way to mend what fails, and an answer that must be the known one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny import CHAT_TEMPLATE, make_tiny_model
from tiny_wheel import CONTENT, make_entry

from tinyvllm_cli import doctor
from tinyvllm_cli.cli import tinyvllm
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.catalogue import obtain

CHECKS = ["Python", "NumPy", "memory", "cache", "default model", "known answer", "GPU"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no GPU, and a known answer that comes without a model."""
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYVLLM_OFFLINE", raising=False)
    monkeypatch.setattr(doctor, "answer", lambda *args: doctor.KNOWN_IDS)
    monkeypatch.setattr("tinyvllm_cli.backends.gpu.driver.find_driver", lambda: None)


def run() -> tuple[int, dict[str, str], str]:
    """Exit code, "ok" or "no" by check, standard output."""
    result = CliRunner().invoke(tinyvllm, ["doctor"])
    lines = [line for line in result.stdout.splitlines() if not line.startswith("    ")]
    return result.exit_code, {line[4:].split(":")[0]: line[:3].strip() for line in lines}, result.stdout


def test_a_sound_machine_is_told_so():
    code, verdicts, output = run()
    assert verdicts == dict.fromkeys(CHECKS, "ok")
    assert code == 0
    assert output.splitlines()[-2:] == [
        "ok  known answer: equal",
        "ok  GPU: no NVIDIA device is visible, models run on the CPU",
    ]


def failing(exception: Exception):
    def check(*args: object) -> None:
        raise exception

    return check


@pytest.mark.parametrize(
    ("check", "spoil", "says"),
    [
        ("memory", ("available_memory", lambda: 100_000_000), "100 MB available, 1.0 GB needed"),
        ("cache", ("free_bytes", lambda folder: 1000), "TINYVLLM_CACHE"),
        ("cache", ("make_folder", failing(ModelError("set TINYVLLM_CACHE"))), "set TINYVLLM_CACHE"),
        ("known answer", ("answer", lambda *args: (504, 3575)), r"different: ids [504, 3575], wanted [504, 3575, 282"),
        ("known answer", ("answer", failing(ModelError("no such file"))), "no such file"),
        ("known answer", ("answer", failing(ZeroDivisionError("a bug"))), "ZeroDivisionError: a bug"),
        ("known answer", ("answer", failing(MemoryError())), "ulimit -v"),
        ("NumPy", ("_numpy", failing(ImportError("libopenblas"))), "pip check"),
    ],
)
def test_one_fault_is_one_no_with_its_mending_and_exit_code_1(monkeypatch, check, spoil, says):
    monkeypatch.setattr(doctor, *spoil)
    code, verdicts, output = run()
    assert verdicts == {name: "no" if name == check else "ok" for name in CHECKS}
    assert code == 1
    assert says in output
    assert "Traceback" not in output


WRONG = (504, 3575)


def mending(output: str) -> list[str]:
    return [line.removeprefix("    to mend: ") for line in output.splitlines() if line.startswith("    ")]


def test_a_damaged_model_is_mended_by_fetching_it_again(tmp_path, monkeypatch):
    entry = make_entry(tmp_path / "index", monkeypatch, name=doctor.DEFAULT_MODEL)
    path = obtain(entry, report=print, progress=False)
    path.write_bytes(CONTENT[::-1])
    monkeypatch.setattr(doctor, "answer", lambda *args: WRONG)
    code, verdicts, output = run()
    assert (code, [name for name, verdict in verdicts.items() if verdict == "no"]) == (1, CHECKS[4:6])
    assert mending(output) == [f"rm {path} && TINYVLLM_OFFLINE=0 tinyvllm models pull {doctor.DEFAULT_MODEL}"] * 2


@pytest.mark.parametrize("spoiled", [lambda *args: WRONG, failing(doctor.NoAnswerError("nan_logits: no number"))])
def test_a_wrong_answer_of_the_right_model_is_mended_by_converting_it_again(tmp_path, monkeypatch, spoiled):
    obtain(make_entry(tmp_path / "index", monkeypatch, name=doctor.DEFAULT_MODEL), report=print, progress=False)
    monkeypatch.setattr(doctor, "answer", spoiled)
    assert mending(run()[2]) == [doctor.REINSTALL_NUMPY]
    copies = tmp_path / "cache" / "converted"
    copies.mkdir()
    assert mending(run()[2]) == [f"rm -r {copies}"]


def test_offline_without_the_default_model_is_a_fault(monkeypatch):
    monkeypatch.setenv("TINYVLLM_OFFLINE", "1")
    code, verdicts, output = run()
    assert (code, verdicts["default model"]) == (1, "no")
    assert "tinyvllm models pull smollm2-135m-instruct" in output


def test_the_known_ids_are_those_of_the_reference():
    golden = json.loads((Path(__file__).parent / "data/golden/smollm2_135m_instruct.json").read_text())
    [record] = [
        record for record in golden["records"] if record["prompt"] == [{"role": "user", "content": doctor.QUESTION}]
    ]
    assert list(doctor.KNOWN_IDS) == record["output_ids"]
    assert list(doctor.KNOWN_MARGINS) == record["margins"]


def test_the_answer_comes_from_the_real_engine(tmp_path, monkeypatch):
    monkeypatch.undo()
    folder = str(make_tiny_model(tmp_path / "tiny", chat_template=CHAT_TEMPLATE, max_position_embeddings=512))
    ids = doctor.answer(folder, doctor.QUESTION, 5, report=print)
    assert 1 <= len(ids) <= 5
    assert doctor.answer(folder, doctor.QUESTION, 5, report=print) == ids
    assert doctor.answer(folder, "Another question?", 5, report=print) != ids


@pytest.mark.model
def test_the_known_answer_is_equal(default_model, monkeypatch):
    monkeypatch.undo()
    code, verdicts, output = run()
    assert "ok  known answer: equal" in output
    assert (code, set(verdicts.values())) == (0, {"ok"})
