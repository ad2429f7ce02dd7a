"""What `tinyvllm doctor` says of a GPU, and --compare, over an emulated card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_ops import OPS, broken
from command import run_here
from emulated_cuda import Runtime
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli import doctor, load
from tinyvllm_cli.backends import gpu
from tinyvllm_cli.backends.gpu import backend, checks, ops
from tinyvllm_cli.backends.gpu.checks import MAX_ROWS, agreement, forced_logits, rows_keep_bits
from tinyvllm_cli.backends.gpu.kernels import KERNELS
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import DeviceError

SOFTWARE = ["GPU", "NVIDIA driver", "CUDA libraries", "kernel cache"]
GPU_CHECKS = [*SOFTWARE, *(f"GPU op {op}" for op in OPS), "row invariance", "known answer on the GPU"]
Spoil = Callable[[str, float], None]  # an op gives its result times this number


@pytest.fixture
def card(cuda: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Short prompts, small products, a tiny model: its answer is the known one, its logits have the margins."""
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks, "SHAPES", ((48, 64), (64, 136)))
    monkeypatch.setattr(checks, "PROMPT_LENGTHS", (5, 21))
    tiny = str(make_tiny_model(tmp_path / "tiny", chat_template=CHAT_TEMPLATE, head_dim=64))
    monkeypatch.setattr(doctor, "_default_model", lambda: doctor.Check("default model", True, "is here"))
    monkeypatch.setattr(doctor, "DEFAULT_MODEL", tiny)
    monkeypatch.setenv("TINYVLLM_MODEL", tiny)  # of --compare
    set_known_answer(tiny, monkeypatch)
    return cuda


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    def replace_ops(name: str, factor: float) -> None:
        def off(op: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            result = op(device, *args, **kwargs)
            device.stream.synchronize()
            host = result.view(np.ndarray)
            host[:] = host.astype(np.float32) * factor
            return result

        for module in (gpu, backend, checks):
            monkeypatch.setattr(module, "ops", broken(name, off, ops))

    return replace_ops


def set_known_answer(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = doctor.answer(tiny, doctor.QUESTION, 8, print)
    config = EngineOptions(slots=8, max_model_len=256)
    with closing(load.open_engine(tiny, backend="cpu", config=config, report=print)) as loaded:
        logits = np.sort(forced_logits(loaded.backend, doctor._prompt_ids(loaded, doctor.QUESTION), ids))
    monkeypatch.setattr(doctor, "KNOWN_IDS", ids)
    monkeypatch.setattr(doctor, "KNOWN_MARGINS", tuple(logits[:, -1] - logits[:, -2]))


def lines_of(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Exit code, and of each check "ok" or "no" and what was found."""
    code = run_here("doctor", *args)
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("    ")]
    found = dict(line[4:].split(": ", 1) for line in lines)
    return code, dict(zip(found, (line[:3].strip() for line in lines), strict=True)), found


@pytest.mark.emulated
def test_a_sound_gpu_is_told_so(capfd, card, tmp_path):
    code, verdicts, found = lines_of(capfd)
    assert list(verdicts)[-len(GPU_CHECKS) :] == GPU_CHECKS
    assert (code, set(verdicts.values())) == (0, {"ok"})
    assert found["GPU"] == "Emulated, compute capability 9.0, 1.1 GB of 1.1 GB free"
    assert found["NVIDIA driver"] == "runs CUDA 13.0"
    assert found["CUDA libraries"] == "CuPy 14.2.0, cuBLAS 13.1.0, NVRTC 13.0"
    assert (
        found["kernel cache"]
        == f"{tmp_path}/cache/kernels, 0 files were there, {len(set(KERNELS.values()))} compiled now"
    )
    assert found["row invariance"] == "yes: a row has the same bits among 1 to 300 rows"


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["attention", "gate_up_silu"])
def test_a_faulty_op_is_one_no(capfd, card, spoil, op):
    spoil(op, 1.1)
    code, verdicts, _ = lines_of(capfd)
    faults = {name for name, verdict in verdicts.items() if verdict == "no"}
    assert f"GPU op {op}" in faults
    assert faults <= {f"GPU op {op}", "known answer on the GPU"}  # whose logits it changes as well
    assert code == 1


@pytest.mark.emulated
def test_a_card_whose_rows_depend_on_their_number_is_a_fact_and_no_fault(capfd, card, monkeypatch):
    def product(device: Any, n: int, k: int) -> Any:
        return lambda first, count: np.full((count, n), 1 if n == 48 or count < 100 else 2, np.float32)

    monkeypatch.setattr(checks, "_product", product)
    code, verdicts, found = lines_of(capfd)
    assert (code, verdicts["row invariance"]) == (0, "ok")
    assert found["row invariance"] == ("no: answers on this card may depend on what runs beside them (products 64x136)")


@pytest.mark.emulated
def test_a_gpu_that_cannot_be_used_is_one_no_with_what_mends_it(capfd, card, monkeypatch):
    def fail() -> None:
        raise DeviceError("CuPy is not installed: run `pip install cupy`")

    monkeypatch.setattr(checks, "open_card", fail)
    code, verdicts, found = lines_of(capfd)
    assert (code, [name for name, verdict in verdicts.items() if verdict == "no"]) == (1, ["GPU"])
    assert list(verdicts)[-1] == "GPU"
    assert found["GPU"] == "CuPy is not installed: run `pip install cupy`"


# ---------------------------------------------------------------- a known answer


@pytest.mark.emulated
def test_wrong_logits_are_no_known_answer(capfd, card, spoil):
    spoil("norm_lm_head", -1)
    assert lines_of(capfd)[1]["known answer on the GPU"] == "no"


IDS, MARGINS = (2, 0, 1), (1.0, 0.5, 0.1)
EXACT = np.array([[0, 0, 1], [0.5, 0, 0], [0, 0.1, 0]], np.float32)


@pytest.mark.parametrize(
    ("error", "num_certain"), [(0.01, 3), (0.04, 3), (0.06, 2), (0.24, 2), (0.26, 1), (0.6, 0), (np.nan, 0)]
)
def test_steps_count_whose_margin_is_more_than_twice_the_error(error, num_certain):
    found = EXACT.copy()
    found[0, 0] += error
    result = agreement(found, EXACT, IDS, MARGINS)
    assert (result.num_certain, result.num_steps) == (num_certain, 3)
    assert result.ok == (num_certain >= 1), "no answer is known where rounding may have changed nearly all of it"


@pytest.mark.parametrize(("ids", "wrong"), [((2, 0, 1), ()), ((2, 1, 1), (1,)), ((0, 1, 1), (0, 1)), ((2, 0, 0), ())])
def test_every_step_that_counts_must_be_equal(ids, wrong):
    found = EXACT + np.array([[0], [0], [0.06]], np.float32)  # the last step does not count
    result = agreement(found, EXACT, ids, MARGINS)
    assert (result.wrong, result.ok) == (wrong, not wrong)
    assert str(result).startswith(f"equal at {2 - len(wrong)} of 2 steps") and str(result).endswith("of 3 in all")


# ---------------------------------------------------------------- bits


ROWS = np.random.default_rng(0).standard_normal((MAX_ROWS, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("product", "kept"),
    [
        (lambda first, count: ROWS[first : first + count], True),
        (lambda first, count: ROWS[first : first + count] * np.float32(1 if count > 8 else 1 + 2e-7), False),
        (lambda first, count: ROWS[first : first + count] + np.float32(1e-6) * (np.arange(count) == 7)[:, None], False),
    ],
    ids=["a function of the row", "of the number of rows", "of the place"],
)
def test_a_bit_that_changes_is_seen(product, kept):
    assert rows_keep_bits(product) is kept


# ---------------------------------------------------------------- --compare cpu


@pytest.mark.emulated
def test_compare_names_no_op_where_all_are_sound(capfd, card):
    code, verdicts, found = lines_of(capfd, "--compare", "cpu")
    assert list(verdicts) == [*OPS, "first op that differs beyond its tolerance"]
    assert (code, found["first op that differs beyond its tolerance"]) == (0, "none")
    assert "tolerance" in found["attention"]


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["attention", "gate_up_silu", "norm_lm_head"])
def test_compare_names_the_first_op_at_fault(capfd, card, spoil, op):
    spoil(op, 1.1)
    code, verdicts, found = lines_of(capfd, "--compare", "cpu")
    assert [name for name in OPS if verdicts[name] == "no"] == [op]
    assert found["first op that differs beyond its tolerance"].startswith(f"{op}: error ")
    assert code == 1


@pytest.mark.emulated
def test_compare_takes_a_model_without_a_chat_template(capfd, card, tmp_path):
    plain = make_tiny_model(tmp_path / "plain", head_dim=64)
    assert lines_of(capfd, "--compare", "cpu", "-m", str(plain))[0] == 0


def test_compare_without_a_gpu_says_so(capfd, monkeypatch):
    monkeypatch.setattr("tinyvllm_cli.backends.gpu.driver.find_driver", lambda: None)
    assert run_here("doctor", "--compare", "cpu") == 1
    assert capfd.readouterr().err == (
        "error: --compare cpu needs a GPU, and no NVIDIA device is visible: see whether `nvidia-smi` lists one\n"
    )


def test_a_model_without_compare_is_refused(capfd):
    assert run_here("doctor", "-m", "gpt2") == 2
    assert "--compare cpu" in capfd.readouterr().err
