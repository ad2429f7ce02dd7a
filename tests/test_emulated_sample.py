"""The laws of the sample op on the processor: cuda/sample.cu compiled as C++ (cuda_emulator.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import draw_laws
import numpy as np
import pytest
import sample_laws
from cuda_emulator import EmulatedKernels, Emulator
from gpu_tools import OpDevice
from sample_tools import FILTERS, draw

from tinyvllm_cli.backends.gpu import sample
from tinyvllm_cli.backends.gpu.kernels import kernel_sources
from tinyvllm_cli.types import MAX_TOP_LOGPROBS, SlotOptions

pytestmark = pytest.mark.emulated

FEW = (
    SlotOptions(),
    SlotOptions(temperature=1.0),
    SlotOptions(temperature=0.7, top_k=5),
    SlotOptions(temperature=1e300, top_p=0.5),
    SlotOptions(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
)


class HostArray(np.ndarray):
    def set(self, array: np.ndarray, stream: None) -> None:
        self[...] = array


@pytest.fixture(scope="module", params=[False, True], ids=["by one block", "looked at by many"])
def device(request: pytest.FixtureRequest) -> Iterator[OpDevice]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "SCAN_VOCAB", 0 if request.param else 1 << 30)
        yield OpDevice(
            "bfloat16", 64, EmulatedKernels("bfloat16", 64), None, None, lambda array: np.array(array).view(HostArray)
        )


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> sample_laws.Launch:
    file = tmp_path_factory.mktemp("probe") / "probe.cu"
    file.write_text(sample_laws.PROBE)
    emulator = Emulator(str(file), "bfloat16", 64)
    return lambda name, threads, args: emulator.launch(name, (1,), threads, args)


def test_philox_gives_its_known_answers(launch):
    sample_laws.philox_gives_its_known_answers(launch, np.array)


def test_noise_of_the_first_and_last_words_is_the_cpus(launch):
    sample_laws.noise_of_the_first_and_last_words_is_the_cpus(launch, np.array)


@pytest.mark.parametrize(
    ("vocab", "num_ids", "edited", "filters"),
    [(5, 5, True, FEW), (320, 264, True, FILTERS), (9001, 9000, False, FILTERS)],
)
def test_tokens_are_the_cpus(vocab, num_ids, edited, filters, device):
    sample_laws.tokens_are_the_cpus(device, vocab, num_ids, edited=edited, filters=filters)


def test_ties_go_to_the_lowest_ids(device):
    sample_laws.ties_go_to_the_lowest_ids(device, 4000, 3999, FEW)  # more than a list holds


def test_borders_are_exact(device):
    sample_laws.borders_are_exact(device, 2048, sizes=(40,), draws=6)


def test_extremes_are_the_cpus(device):
    sample_laws.extremes_are_the_cpus(device, 131, FEW)


def test_broken_rows_give_no_token(device):
    sample_laws.broken_rows_give_no_token(device, 4101, 4098)


def test_nothing_allowed_is_said(device):
    sample_laws.nothing_allowed_is_said(device, 9, FEW)


def test_a_row_knows_no_neighbour(device):
    sample_laws.a_row_knows_no_neighbour(device, 500, FEW)


def test_tokens_lie_in_their_slots_at_their_positions(device):
    sample_laws.tokens_lie_in_their_slots_at_their_positions(device)


def test_no_rows_give_no_tokens(device):
    sample_laws.no_rows_give_no_tokens(device)


def test_edits_past_an_upload_all_count(device):
    sample_laws.edits_past_an_upload_all_count(device)


def test_edits_outside_of_the_row_do_nothing(device):
    sample_laws.edits_outside_of_the_row_do_nothing(device, 70, 66)


def test_logprobs_are_of_the_raw_logits(device):
    sample_laws.logprobs_are_of_the_raw_logits(device, 9001, 9000, FEW)


def test_a_certain_token_always_comes(device):
    sample_laws.a_certain_token_always_comes(device, 128_256, 3)


@pytest.mark.parametrize("law", draw_laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(("vocab", "num_ids"), [(90, 83), (4102, 4097)])
def test_draw(law, vocab, num_ids, device):
    law(partial(draw, device), vocab, num_ids)


def test_the_kernel_has_room_for_as_many_likeliest_ids_as_may_be_asked_for():
    assert f"constexpr int MAX_TOP = {MAX_TOP_LOGPROBS};" in kernel_sources()["sample.cu"]
