"""The laws of the sample op on the card, at the vocabularies of real models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import draw_laws
import draw_statistics
import pytest
import sample_laws
from draws import Draw
from gpu_tools import OpDevice, open_device, to_gpu
from sample_tools import draw

from tinyvllm_cli.backends.gpu.kernels import compile_options, kernel_sources, target_arch
from tinyvllm_cli.backends.gpu.nvrtc import load_nvrtc
from tinyvllm_cli.types import SlotOptions

pytestmark = pytest.mark.gpu

LLAMA_3 = 128_256
SIZES = [(5, 5), (320, 264), (49_152, 49_152), (LLAMA_3, 128_000)]  # vocabulary, ids of the tokenizer
DRAWS = 8192  # of each setting
SETTINGS = [
    SlotOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.5, 1.0, 1.8, 4.0)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (300, 0.95, 0.001))
]


@pytest.fixture(scope="module")
def device() -> OpDevice:
    return open_device("bfloat16")


@pytest.fixture(scope="module")
def launch() -> sample_laws.Launch:
    import cupy
    from cupy.cuda.function import Module

    nvrtc, capability = load_nvrtc(), cupy.cuda.Device().compute_capability
    arch = target_arch((int(capability[:-1]), int(capability[-1])), nvrtc.supported_archs())
    headers = {name: text for name, text in kernel_sources().items() if name.endswith(".cuh")}
    module = Module()
    module.load(nvrtc.compile("probe.cu", sample_laws.PROBE, headers, compile_options(arch, "bfloat16", 64))[0])
    return lambda name, threads, args: module.get_function(name)((1,), (threads,), args)


def test_philox_gives_its_known_answers(launch: sample_laws.Launch):
    sample_laws.philox_gives_its_known_answers(launch, to_gpu)


def test_noise_of_the_first_and_last_words_is_the_cpus(launch: sample_laws.Launch):
    sample_laws.noise_of_the_first_and_last_words_is_the_cpus(launch, to_gpu)


@pytest.mark.parametrize(("vocab", "num_ids"), SIZES)
@pytest.mark.parametrize("edited", [False, True], ids=["raw", "edited"])
def test_tokens_are_the_cpus(edited: bool, vocab: int, num_ids: int, device: OpDevice):
    sample_laws.tokens_are_the_cpus(device, vocab, num_ids, edited=edited)


@pytest.mark.parametrize(("vocab", "num_ids"), [(7, 7), (2500, 2499), (LLAMA_3, LLAMA_3)])
def test_ties_go_to_the_lowest_ids(vocab: int, num_ids: int, device: OpDevice):
    sample_laws.ties_go_to_the_lowest_ids(device, vocab, num_ids)


@pytest.mark.parametrize("vocab", [256, 1 << 17])
def test_borders_are_exact(vocab: int, device: OpDevice):
    sample_laws.borders_are_exact(device, vocab, sizes=(2, 9, 100), draws=16)


@pytest.mark.parametrize("vocab", [131, 5000])
def test_extremes_are_the_cpus(vocab: int, device: OpDevice):
    sample_laws.extremes_are_the_cpus(device, vocab)


@pytest.mark.parametrize(("vocab", "num_ids"), [(9, 6), (4101, 4098), (LLAMA_3, 128_000)])
def test_broken_rows_give_no_token(vocab: int, num_ids: int, device: OpDevice):
    sample_laws.broken_rows_give_no_token(device, vocab, num_ids)


def test_nothing_allowed_is_said(device: OpDevice):
    sample_laws.nothing_allowed_is_said(device, 9)


@pytest.mark.parametrize("vocab", [500, 49_152])
def test_a_row_knows_no_neighbour(vocab: int, device: OpDevice):
    sample_laws.a_row_knows_no_neighbour(device, vocab)


def test_tokens_lie_in_their_slots_at_their_positions(device: OpDevice):
    sample_laws.tokens_lie_in_their_slots_at_their_positions(device)


def test_no_rows_give_no_tokens(device: OpDevice):
    sample_laws.no_rows_give_no_tokens(device)


def test_edits_past_an_upload_all_count(device: OpDevice):
    sample_laws.edits_past_an_upload_all_count(device)


def test_edits_outside_of_the_row_do_nothing(device: OpDevice):
    sample_laws.edits_outside_of_the_row_do_nothing(device, 70, 66)


@pytest.mark.parametrize(("vocab", "num_ids"), SIZES)
def test_logprobs_are_of_the_raw_logits(vocab: int, num_ids: int, device: OpDevice):
    sample_laws.logprobs_are_of_the_raw_logits(device, vocab, num_ids)


def test_a_certain_token_always_comes(device: OpDevice):
    sample_laws.a_certain_token_always_comes(device, LLAMA_3, 300)


@pytest.mark.parametrize("law", draw_laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(("vocab", "num_ids"), [(90, 83), (4102, 4097), (49_152, 49_152), (LLAMA_3, 128_000)])
def test_draw(law: Callable[[Draw, int, int], None], vocab: int, num_ids: int, device: OpDevice):
    law(partial(draw, device), vocab, num_ids)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_chi_square_of_draws(options: SlotOptions, device: OpDevice):
    sample_laws.draws_follow_the_probabilities(device, LLAMA_3, options, DRAWS)


@pytest.mark.parametrize("number", range(len(draw_statistics.SETTINGS)))
def test_draws_follow_the_exact_probabilities_and_are_numpys(number: int, device: OpDevice):
    drawn = draw_statistics.draw_many(draw_statistics.one_by_one(partial(draw, device)), number, seeds=2000)
    draw_statistics.assert_probable(drawn, number)
    draw_statistics.assert_numpys(drawn, number)
