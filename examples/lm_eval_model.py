"""lm-evaluation-harness on this engine: the model class `tinyvllm` for it, and a command that evaluates tasks with it.

pip install '.[lm-eval]'
python examples/lm_eval_model.py --tasks capitals,opposites,passages --include-path examples/lm_eval_tasks
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from tinyvllm_cli import LLM, Completion, Message, Request, SamplingParams, TinyvllmError
from tinyvllm_cli.config import DEFAULT_MODEL


@register_model("tinyvllm")
class TinyvllmLM(TemplateLM):
    """A model of tinyvllm_cli.LLM, which the options are for.

    Gives what the harness's own `hf` model gives: texts are split into ids, cut and laid out in windows in its way. All
    requests of a kind go to the engine in one call. Of an answer that begins with a thought, only what follows counts.
    """

    max_gen_toks = 256  # of an answer, where a task does not say

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        super().__init__()
        self.llm = LLM(model, **options)
        self.max_length = self.llm.max_model_len
        self._tokenizer = self.llm.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of the harness's requests."""
        return self.llm.model.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """BOS stands first where the tokenizer adds it, never twice."""
        return self._tokenizer.encode(string, add_bos=add_special_tokens is not False)

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        """Of each text: every token once, in windows as long as the context where it is longer."""
        windows = [
            (place, *make_disjoint_window(window))
            for place, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
        ]
        sums = [0.0] * len(requests)
        for (place, *_), (logprob, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[place] += logprob
        return sums

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        asked = [self._request(place, *request.args) for place, request in enumerate(requests)]
        return [completion.choices[0].text for completion in _answered(self.llm.generate(asked))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        messages = [Message(**message) for message in chat_history]
        return self._template.render(messages, continue_final_message=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """For the record of the results."""
        return self._template.source if chat_template else None

    @property
    def _template(self) -> Any:
        template = self.llm.chat_template
        if template is None:
            raise ValueError(f"{self.tokenizer_name} has no chat template")
        return template

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of the last ids of each request behind those before them, and whether all are the likeliest.

        What is too long loses its start. The last id is never fed, so that one more than the context holds fits.
        """
        pairs = []
        for _name, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} tokens, and the context {self.max_length}")
            room = self.max_length + 1 - len(continuation)
            pairs.append((context[-room:], [continuation]))
        scores = [completion.scores[0] for completion in _answered(self.llm.score(pairs))]
        return [(score.logprob, score.greedy) for score in scores]

    def _request(self, place: int, context: str, gen_kwargs: dict[str, Any]) -> Request:
        """place: in the list; equal prompts (`repeats` of a task) get answers of their own where they are sampled."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        max_tokens = options.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(f"max_gen_toks is {max_tokens}, wanted less than the context, {self.max_length} tokens")
        options.pop("do_sample")  # where it is false, the temperature is 0
        stop = [text for text in handle_stop_sequences(options.pop("until"), self._tokenizer.eos_token) if text]
        params = SamplingParams(max_tokens=max_tokens, stop=stop, **options)
        return Request(prompt_token_ids=self.tok_encode(context)[-room:], custom_id=place, params=params)


def _answered(completions: Iterable[Completion]) -> Iterable[Completion]:
    """The same ones. A metric without one of its samples would mean something else, so a failed one is an error."""
    for completion in completions:
        if completion.error is not None:
            raise RuntimeError(f"request {completion.request_id}: {completion.error.message}")
        yield completion


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a model on tasks of lm-evaluation-harness.")
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL, help="as of tinyvllm run")
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--include-path", type=Path, help="a folder with tasks of your own")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question")
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument("--backend", default="auto", choices=("auto", "gpu", "cpu"))
    parser.add_argument("--max-model-len", type=int, help="tokens of the context")
    args = parser.parse_args()
    try:
        model = TinyvllmLM(args.model, backend=args.backend, max_model_len=args.max_model_len)
    except TinyvllmError as error:
        sys.exit(f"error: {error}")
    results = simple_evaluate(
        model,
        tasks=args.tasks.split(","),
        task_manager=TaskManager(include_path=args.include_path and str(args.include_path)),
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        apply_chat_template=args.apply_chat_template,
    )
    print(make_table(results))
    model.llm.close()


if __name__ == "__main__":
    main()
