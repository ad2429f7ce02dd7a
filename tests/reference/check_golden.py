"""Recompute tests/data/golden with transformers: greedy ids, first-step logits and margins, from the stored prompt ids.

Run with the project's `reference` and `dev` extras: python tests/reference/check_golden.py MODEL.gguf
Prints one line a record and fails where one differs.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "smollm2_135m_instruct.json"


def greedy(model: torch.nn.Module, prompt_ids: list[int], eos: int, max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Output ids up to and with EOS, and the logits f32[steps, V] that chose them, without a cache of K and V."""
    ids, rows = list(prompt_ids), []
    with torch.no_grad():
        while len(rows) < max_tokens and (not rows or ids[-1] != eos):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt_ids) :], torch.stack(rows)


def main(path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    decode = golden["decode"]
    for record in golden["records"]:
        output_ids, rows = greedy(model, record["prompt_ids"], decode["eos_token_id"], decode["max_new_tokens"])
        ids, values = zip(*record["first_step_top20"], strict=True)
        off = float((rows[0][list(ids)] - torch.tensor(values)).abs().max())
        top = rows.topk(2).values
        margin = float((top[:, 0] - top[:, 1]).min())
        print(f"{record['prompt_text'][-30:]!r}: logits off by {off:.1e}, least margin {margin:.5f}")
        assert output_ids == record["output_ids"]
        assert off < 1e-4
        assert abs(margin - record["min_margin"]) < 1e-4
        assert abs(float(rows[0].logsumexp(0)) - record["first_step_logsumexp"]) < 1e-4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
