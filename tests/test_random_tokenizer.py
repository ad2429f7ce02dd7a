"""The tokenizer of random weights: exactly the asked number of ids, each of them some bytes, and none lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clock import units
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.model.presets import PRESETS
from tinyvllm_cli.text.detokenizer import Detokenizer
from tinyvllm_cli.text.random_tokenizer import random_tokenizer
from tinyvllm_cli.text.tokenizer import Tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "bytes": {"vocab_size": 258, "bos_token_id": 257, "eos_token_id": 0},
    "three": {"vocab_size": 70_000, "bos_token_id": 69_999, "eos_token_id": [5, 69_998]},
    **{name: dict(config) for name, config in PRESETS.items()},
}
SMALL = random_tokenizer(PRESETS["smollm2-135m"])
LARGE = random_tokenizer(PRESETS["llama-3.2-1b"])


@pytest.mark.parametrize("config", SIZES.values(), ids=SIZES)
def test_every_id_is_other_bytes_and_only_control_words_are_left_out(config: dict[str, Any]):
    made: list[Tokenizer] = []
    assert units(lambda: made.append(random_tokenizer(config)), rounds=1) < 300
    tokenizer = made[0]
    size = config["vocab_size"]
    assert tokenizer.size == tokenizer.core.get_vocab_size() == size
    eos = config["eos_token_id"]
    eos_ids = [eos] if isinstance(eos, int) else eos
    control = {config["bos_token_id"], *eos_ids}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config["bos_token_id"], eos_ids[0])
    pieces = {tokenizer.token_bytes(id) for id in range(size) if id not in control}
    assert len(pieces) == size - len(control) and b"" not in pieces
    assert {bytes([byte]) for byte in range(256)} <= pieces
    assert {len(piece) for piece in pieces} <= {1, 2, 3}
    assert all(tokenizer.token_bytes(id) == b"" for id in control)
    assert tokenizer.token_bytes(size, skip_special=False) == b""


@pytest.mark.parametrize("tokenizer", [SMALL, LARGE], ids=["smollm2-135m", "llama-3.2-1b"])
@given(text=st.text(), added=st.binary(max_size=20))
def test_text_comes_back_and_bytes_go_out(tokenizer: Tokenizer, text: str, added: bytes):
    ids = tokenizer.encode(text, add_bos=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    of_byte = {tokenizer.token_bytes(id): id for id in range(257)}
    detokenizer = Detokenizer(tokenizer.token_bytes)
    shown = "".join(detokenizer.push(of_byte[bytes([byte])]) for byte in added) + detokenizer.finish()
    assert shown == added.decode(errors="replace")


def test_it_is_the_same_each_time_and_in_its_file(tmp_path: Path):
    from tokenizers import Tokenizer as Core

    again = random_tokenizer(PRESETS["llama-3.2-1b"]).core.to_str()
    assert again == LARGE.core.to_str()
    (tmp_path / "tokenizer.json").write_text(again)
    assert Core.from_file(str(tmp_path / "tokenizer.json")).to_str() == again
