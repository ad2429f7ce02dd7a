"""Ray Data on this engine: actors hold a model each, and answer a column of a data set batch by batch.

pip install '.[ray]'
python examples/ray_data.py
python examples/ray_data.py reviews.csv --column review > answers.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import ray

from tinyvllm_cli import LLM, SamplingParams
from tinyvllm_cli.config import DEFAULT_MODEL

Batch = dict[str, np.ndarray[Any, Any]]
READERS = {".jsonl": ray.data.read_json, ".csv": ray.data.read_csv}
COUNTRIES = ("France", "Italy", "Spain", "Norway", "Japan", "Kenya", "Canada", "Peru")


class Answerer:
    """An actor of map_batches: it loads the model once, and answers all rows of a batch in one call.

    A batch gets two more columns: `answer`, and `error`, which says why a row has none. options: of LLM.
    """

    def __init__(self, column: str, params: SamplingParams, model: str, **options: Any) -> None:
        self.column, self.params = column, params
        self.llm = LLM(model, **options)

    def __call__(self, batch: Batch) -> Batch:
        completions = self.llm.chat(batch[self.column].tolist(), self.params)
        answers = [completion.choices[0].text if completion.choices else None for completion in completions]
        errors = [completion.error.message if completion.error else None for completion in completions]
        return {**batch, "answer": np.array(answers, object), "error": np.array(errors, object)}


def answer(
    rows: ray.data.Dataset,
    column: str,
    params: SamplingParams,
    model: str = DEFAULT_MODEL,
    *,
    actors: int = 1,
    batch_size: int = 1024,
    **options: Any,
) -> ray.data.Dataset:
    """The rows with their answers. options: of LLM, in every actor.

    batch_size: several times the slots of an engine (256 on a GPU, 32 on a CPU), which idle at the end of a batch.
    """
    has_gpu = options.get("backend") != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    return rows.map_batches(
        Answerer,
        fn_constructor_args=(column, params, model),
        fn_constructor_kwargs=options,
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_gpus=1 if has_gpu else 0,
        num_cpus=options.get("threads") or 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a column of a data set; rows go to standard output as JSON.")
    parser.add_argument("input", nargs="?", type=Path, help="a .jsonl or .csv file; else some rows are made")
    parser.add_argument("--column", default="question", help="what a user says")
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL, help="as of tinyvllm run")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--backend", default="auto", choices=("auto", "gpu", "cpu"))
    parser.add_argument("--threads", type=int, help="of an actor on the CPU")
    parser.add_argument("--actors", type=int, default=1)
    args = parser.parse_args()
    if args.input and not args.input.is_file():
        parser.error(f"there is no file {args.input}")
    if args.input and args.input.suffix not in READERS:
        parser.error(f"{args.input} is no .jsonl or .csv file")
    ray.init(log_to_driver=False)
    if args.input:
        rows = READERS[args.input.suffix](str(args.input))
    else:
        rows = ray.data.from_items([{"question": f"What is the capital of {country}?"} for country in COUNTRIES])
    if args.column not in (columns := rows.columns()):
        parser.error(f"there is no column {args.column}, found {', '.join(columns)}")
    params = SamplingParams(max_tokens=args.max_tokens)
    options = {"backend": args.backend, "threads": args.threads}
    for row in answer(rows, args.column, params, args.model, actors=args.actors, **options).iter_rows():
        print(json.dumps(row, ensure_ascii=False, default=str))


if __name__ == "__main__":
    main()
