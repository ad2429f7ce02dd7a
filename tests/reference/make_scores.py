"""Store what transformers says of 200 texts, and of contexts with continuations, with the default model in float32:
tests/data/reference/scores.json.

Run with the project's `reference` extra installed: python tests/reference/make_scores.py MODEL.gguf
Each text is computed alone, without a cache of K and V. Log-softmax and sums are in float64.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TARGET = Path(__file__).parent.parent / "data" / "reference" / "scores.json"

WHO = ["The baker", "My grandmother", "A young fox", "Nobody", "Le facteur", "Der Hund", "En robot", "彼女", "Η γάτα"]
DOES = ["counted", "painted", "forgot", "hid", "sold", "repaired", "sang about", "looked for", "carried", "measured"]
WHAT = [
    "seven blue bottles",
    "the old bridge",
    "a map of the moon",
    "her keys",
    "two loaves of bread",
    "the north wind",
]
WHEN = ["before breakfast", "in the rain", "every Sunday", "on 14 March 1987", "at 23:59", "when the lights went out"]
ENDS = [".", "!", "?", " ...", ", and smiled.", " 🙂", "\n", " (again).", "; nobody knew why."]
CODE = ["for i in range({n}):\n    print(i * {n})", "SELECT name FROM plums WHERE ripe = {n};", "x = {n} / 7 + 0.{n}"]
CODE += [
    "def f{n}(a, b):\n    return a if a > b else b\n",
    '{{"id": {n}, "tags": ["a", "b"]}}',
    "git log -n {n} | wc -l",
]
FACTS = ["{n} plus {n} is", "The {n}th letter of the word is", "Water boils at {n} degrees.", "Page {n} of {n}{n}\t|"]
MIXED = [
    "é{n}ß ñ",
    "ー{n}円です。",
    "  two  spaces {n}",
    "ALL CAPS {n} TIMES",
    "http://example.org/{n}?q=plum",
    "{n} 🍑🍒",
]


def texts() -> list[str]:
    """200 that differ: sentences, code, numbers, other scripts, blanks and emoji."""
    rng = random.Random(7)
    found = [
        f"{rng.choice(WHO)} {rng.choice(DOES)} {rng.choice(WHAT)} {rng.choice(WHEN)}{rng.choice(ENDS)}"
        for _ in range(150)
    ]
    found += [rng.choice(CODE + FACTS + MIXED).format(n=number) for number in rng.sample(range(2, 999), 70)]
    return list(dict.fromkeys(found))[:200]


PAIRS = [
    ("The capital of France is", [" Paris", " London", " a small town in the hills"]),
    ("The capital of France is ", ["Paris", "London"]),
    ("Question: Is the sky blue?\nAnswer:", [" yes", " no"]),
    ("Two plus two is four. Three plus three is", [" six.", " seven.", " six. Four plus four is eight."]),
    ("un", ["believable", " chien"]),
    ("Once upon a time, ", ["there was a king.", "\n", "xylophone"]),
    ("def add(a, b):\n    return", [" a + b", " a - b", " a+b\n"]),
    ("名前は", ["何ですか", "太郎です。", " x"]),
]


def score(model: torch.nn.Module, ids: list[int], first: int) -> dict[str, Any]:
    """Of the ids from position `first` on."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
    targets = torch.tensor(ids[first:])
    each = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    greedy = bool((logits.argmax(-1) == targets).all())
    return {"logprob": float(each.sum()), "tokens": len(each), "greedy": greedy}


def main(path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    stored: dict[str, Any] = {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "texts": [{"text": text, **score(model, encode(text), 1)} for text in texts()],
        "pairs": [],
    }
    for context, continuations in PAIRS:
        # The border as lm-evaluation-harness has it (api/model.py, TemplateLM._encode_pair).
        blanks = len(context) - len(context.rstrip())
        head = encode(context[: len(context) - blanks])
        scores = []
        for continuation in continuations:
            tail = encode(context + continuation)[len(head) :]
            scores.append(score(model, head + tail, len(head)))
        stored["pairs"].append({"context": context, "continuations": continuations, "scores": scores})
    TARGET.parent.mkdir(exist_ok=True)
    lines = (
        json.dumps(stored, ensure_ascii=False)
        .replace('{"text": ', '\n{"text": ')
        .replace('{"context": ', '\n{"context": ')
    )
    TARGET.write_text(lines + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
