"""A trained run as a model of the LM Evaluation Harness (`lm-eval`, an optional package).

    python -m pip install -r requirements-optional.txt
    python -m k3jax.lm_eval_adapter runs/nano --tasks my_task --include folder/with/yaml

From Python: ``lm_eval.simple_evaluate(model=K3LM.from_run(run), tasks=[...])``. Which tasks there are, and where their
text comes from, is the harness's business; nothing here downloads anything.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from k3jax import config as c
from k3jax import runtime
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.data.tokenizers import Tokenizer, make_tokenizer
from k3jax.evaluation.predict import predictor
from k3jax.evaluation.text import Pair, continue_until, log_likelihoods
from k3jax.model.weights import Weights
from k3jax.sampling import Sampling

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("lm-eval is not installed: python -m pip install -r requirements-optional.txt") from error


class K3LM(TemplateLM):
    """Scores and continues text for the harness. Every text begins with BOS, as documents do in training.

    Args:
      model, weights, tokenizer: the model.
      max_length: tokens that the model reads at the most; of more text the end counts.
      batch: rows of a call of the model.
      max_new: tokens of a continuation whose task does not say.
      chunk: positions of a row whose logits exist at a time.
    """

    def __init__(
        self,
        model: c.ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch: int = 8,
        max_new: int = 256,
        chunk: int = 128,
    ):
        super().__init__()
        self._model, self._weights, self._tokens = model, weights, tokenizer
        self._predict = predictor(model, weights, chunk=chunk)
        self.max_length, self.batch_size, self.max_new = max_length, batch, max_new

    @classmethod
    def from_run(
        cls, run: str | pathlib.Path, *, step: int | None = None, max_length: int | None = None, batch: int = 8
    ) -> "K3LM":
        """The model of a run at ``step``, by default the newest; it reads rows as long as in training by default.

        Raises:
          CheckpointError: there is no such run or step, or it is damaged.
        """
        with Checkpoints(pathlib.Path(run), create=False) as checkpoints:
            config, state = checkpoints.load(step)
        length = max_length or config.at(config.last_stage).seq_len
        tokenizer = make_tokenizer(config.tokenizer)
        return cls(
            config.model, state.weights, tokenizer, max_length=length, batch=batch, chunk=min(length, config.loss_chunk)
        )

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eos

    @property
    def prefix_token_id(self) -> int:
        return self._tokens.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Token ids, with BOS in front unless ``add_special_tokens`` is False."""
        start = [] if add_special_tokens is False else [self._tokens.bos]
        return [*start, *self._tokens.encode(string).tolist()]

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """Log-probability and greediness of requests (strings, context ids, continuation ids)."""
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        return log_likelihoods(self._predict, pairs, batch=self.batch_size, max_length=self.max_length)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts. One that is too long is read in windows: every token is predicted once, and
        the last window is as long as the others."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [make_disjoint_window(window) for window in cut]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._score(windows)):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations. The settings of a request that count are ``until``, ``max_gen_toks``, ``do_sample``,
        ``temperature`` and ``top_p``."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for settings, numbers in groups.items():
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            for number, text in zip(numbers, self._continue(prompts, json.loads(settings))):
                texts[number] = text
        return texts

    def _continue(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        max_new = int(settings.get("max_gen_toks", self.max_new))
        room = self.max_length - max_new
        if room < 1:
            raise ValueError(f"max_gen_toks = {max_new} leaves no room in max_length = {self.max_length} for a prompt")
        return continue_until(
            self._model,
            self._weights,
            self._tokens,
            [prompt[-room:] for prompt in prompts],
            until=[until] if isinstance(until, str) else until,
            max_new=max_new,
            batch=self.batch_size,
            sampling=_sampling(settings),
        )


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Greedy unless a temperature is given and sampling is not switched off."""
    temperature = float(settings.get("temperature", 0.0))
    if not settings.get("do_sample", temperature > 0):
        return Sampling(temperature=0.0)
    return Sampling(temperature=temperature or 1.0, top_p=float(settings.get("top_p", 1.0)))


def open_tasks(names: Sequence[str], include: str | None) -> TaskManager:
    """The harness's tasks, or those of the folder ``include`` alone.

    Raises:
      ValueError: a name is not among them.
    """
    manager = TaskManager(include_path=include, include_defaults=include is None)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        found = manager.all_tasks
        some = ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")
        raise ValueError(f"there is no task {unknown[0]!r}; there are {some or 'none'}")
    return manager


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError(f"give the folder of one run; got {argv[1:]}")
    runtime.start()
    args = flags.FLAGS
    try:
        manager = open_tasks(args.tasks, args.include)
        model = K3LM.from_run(argv[1], step=args.step, max_length=args.max_length, batch=args.batch)
        results = lm_eval.simple_evaluate(model=model, tasks=args.tasks, task_manager=manager, limit=args.limit)
    except (ValueError, OSError, CheckpointError) as error:
        raise SystemExit(f"k3jax.lm_eval_adapter: {error}") from error
    path = pathlib.Path(argv[1]) / "lm_eval.json"
    path.write_text(json.dumps(results["results"], indent=1, default=str) + "\n", encoding="utf-8")
    print(lm_eval.utils.make_table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    flags.DEFINE_list("tasks", None, "names of tasks, separated by commas", required=True)
    flags.DEFINE_string("include", None, "a folder with the YAML files of tasks, instead of the harness's own tasks")
    flags.DEFINE_integer("step", None, "of the checkpoint; default the newest")
    flags.DEFINE_integer("max_length", None, "tokens read at the most; default the row length of the training")
    flags.DEFINE_integer("batch", 8, "rows of a call of the model", lower_bound=1)
    flags.DEFINE_integer("limit", None, "examples of each task; default all", lower_bound=1)
    app.run(main)
