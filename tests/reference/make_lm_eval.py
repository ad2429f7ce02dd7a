"""Store what lm-evaluation-harness finds with its own `hf` model, which reads a float32 folder of the default model, on
the tasks of examples/lm_eval_tasks: tests/data/reference/lm_eval.json.

Run in the root of the checkout, with the project's `reference` and `lm-eval` extras, accelerate and peft installed:
python examples/gguf_to_folder.py smollm2-135m-instruct FOLDER
python tests/reference/make_lm_eval.py FOLDER
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

TARGET = Path(__file__).parent.parent / "data" / "reference" / "lm_eval.json"
TASKS = "examples/lm_eval_tasks"
CONTEXT = 64  # tokens: so few that of each kind of request some are too long
RUNS = [  # task, whether in the chat template, examples before each question
    ("capitals", False, 0),
    ("capitals", False, 2),
    ("opposites", False, 0),
    ("opposites", True, 0),
    ("passages", False, 0),
]


def run(model: Any, task: str, chat: bool, shots: int) -> dict[str, Any]:
    """Metrics, and what the model gave for each document: [logprob, greedy] of each choice, a text, or a logprob."""
    found = simple_evaluate(
        model,
        tasks=[task],
        task_manager=TaskManager(include_path=TASKS),
        apply_chat_template=chat,
        num_fewshot=shots,
        bootstrap_iters=0,
    )
    metrics = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
    return {
        "task": task,
        "chat": chat,
        "shots": shots,
        "metrics": metrics,
        "responses": [[answer for (answer,) in sample["resps"]] for sample in found["samples"][task]],
    }


def main(folder: str) -> None:
    # A log-softmax in float32 would be off by 1e-5 a token, all to one side: by 1e-3 in the sum over a passage.
    model = HFLM(folder, device="cpu", dtype="float32", softmax_dtype="float64", max_length=CONTEXT)
    packages = ("lm_eval", "torch", "transformers")
    stored = {
        "versions": ", ".join(f"{package} {version(package)}" for package in packages),
        "context": CONTEXT,
        "runs": [run(model, *asked) for asked in RUNS],
    }
    text = json.dumps(stored, ensure_ascii=False)
    TARGET.write_text(text.replace('{"task": ', '\n{"task": ').replace("[[", "\n[[") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
