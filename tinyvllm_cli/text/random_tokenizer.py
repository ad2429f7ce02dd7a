"""A tokenizer for models of random weights: byte-level BPE of a given size whose every id is some bytes."""

from __future__ import annotations

from itertools import chain, islice

from tinyvllm_cli.model.presets import HFConfig
from tinyvllm_cli.text.tokenizer import Tokenizer


def random_tokenizer(config: HFConfig) -> Tokenizer:
    """One with exactly vocab_size ids: bos_token_id and eos_token_id of a config.json are control words, all others
    the 256 bytes, then every two bytes, then three, for as many as there are.

    As those of the published models it is a pre-tokenizer of bytes (Radford et al., GPT-2, 2019) under merges, and
    takes as long to load. It adds no BOS. config has vocab_size, bos_token_id and eos_token_id, one or several.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    bos, eos = config["bos_token_id"], config["eos_token_id"]
    eos_ids = [eos] if isinstance(eos, int) else list(eos)
    control = {id: f"<|special_{id}|>" for id in sorted({bos, *eos_ids})}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the characters that stand for bytes
    merges = _merges(alphabet, config["vocab_size"] - len(control) - len(alphabet))
    pieces = chain(alphabet, map("".join, merges))
    vocab = {control.get(id) or next(pieces): id for id in range(config["vocab_size"])}
    core = Core(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control.values()])
    return Tokenizer(core, bos_token=control[bos], eos_token=control[eos_ids[0]])


def _merges(alphabet: list[str], count: int) -> list[tuple[str, str]]:
    """So many: each makes one new piece of two or three bytes from two that are there."""
    pairs = [(first, second) for first in alphabet for second in alphabet]
    triples = ((first + second, third) for first, second in pairs for third in alphabet)
    return list(islice(chain(pairs, triples), count))
