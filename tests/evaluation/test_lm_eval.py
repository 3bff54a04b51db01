"""A run under the LM Evaluation Harness, on tasks in local files, against the logits of `k3jax.score`."""

import json
import math

import numpy as np
import pytest

from k3jax import config as c
from k3jax import presets, step
from k3jax.checkpoint import Checkpoints
from k3jax.score import score

lm_eval = pytest.importorskip("lm_eval")

TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
    "local_continuation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list:
  - metric: exact_match
""",
}
CHOICES = ["ab", "cd", "ef"]
QUESTIONS = ["one  ", "two: ", "three", "four?", "five ", "six. "]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "micro"
    run.mkdir()
    config = c.replace(presets.tiny(), model=model, seq_len=48)
    with Checkpoints(run) as checkpoints:
        checkpoints.save(config, step.init_state(config), {})
    return run


@pytest.fixture(scope="module")
def adapted(run):
    from k3jax.lm_eval_adapter import K3LM

    return K3LM.from_run(run, batch=4)


@pytest.fixture(scope="module")
def chances(model, adapted):
    """Log-probabilities [question, choice] by the scorer of token files."""
    rows = [adapted.tok_encode(question + choice) for question in QUESTIONS for choice in CHOICES]
    logits = np.zeros((len(rows), len(rows[0]), model.vocab), np.float32)
    score(model, adapted._weights, np.array(rows), logits)
    logs = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=2, keepdims=True))
    found = [sum(log[i, row[i + 1]] for i in range(len(row) - 3, len(row) - 1)) for log, row in zip(logs, rows)]
    return np.array(found).reshape(len(QUESTIONS), len(CHOICES))


def write_tasks(folder, documents):
    for name, settings in TASKS.items():
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        data = f"{{data_files: {{test: {lines}}}}}"
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n{settings}"
        )


def test_the_harness_finds_what_the_scorer_finds(model, adapted, chances, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    best = chances.argmax(axis=1)
    answers = [int(b) if number < 4 else int(b + 1) % 3 for number, b in enumerate(best)]
    first = adapted._continue([adapted.tok_encode(QUESTIONS[0])], {"max_gen_toks": 4, "until": ["\n"]})[0]
    write_tasks(
        tmp_path,
        {
            "local_choice": [dict(question=q, choices=CHOICES, answer=a) for q, a in zip(QUESTIONS, answers)],
            "local_rolling": [dict(text="a text of some length")],
            "local_continuation": [dict(question=q, target=first) for q in QUESTIONS[:1] + ["x"] * 3],
        },
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model=adapted, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    results = found["results"]
    assert results["local_choice"]["acc,none"] == pytest.approx(4 / 6)
    ids = np.array([adapted.tok_encode("a text of some length")])
    bits = score(model, adapted._weights, ids) / math.log(2)
    assert results["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert 0.25 <= results["local_continuation"]["exact_match,none"] <= 1.0


def test_log_likelihoods_and_long_texts(adapted, chances):
    from lm_eval.api.instance import Instance

    def ask(kind, *args):
        return Instance(request_type=kind, doc={}, arguments=args, idx=0)

    requests = [ask("loglikelihood", question, choice) for question in QUESTIONS[2:4] for choice in CHOICES]
    found = [nats for nats, _ in adapted.loglikelihood(requests)]
    np.testing.assert_allclose(np.reshape(found, (2, 3)), chances[2:4], rtol=1e-5)
    text = "words " * 21
    (whole,) = adapted.loglikelihood_rolling([ask("loglikelihood_rolling", text)])
    tokens = adapted.tok_encode(text)
    windows = [(tokens[:1], tokens[1:49]), (tokens[48:49], tokens[49:97]), (tokens[78:97], tokens[97:])]
    assert whole == pytest.approx(sum(nats for nats, _ in adapted._score(windows)), rel=1e-6)


def test_a_prompt_needs_room(adapted):
    with pytest.raises(ValueError, match="max_gen_toks = 48 leaves no room in max_length = 48"):
        adapted._continue([[1]], {"max_gen_toks": 48})


def test_a_task_that_is_not_there_is_named(tmp_path):
    from k3jax.lm_eval_adapter import open_tasks

    write_tasks(tmp_path, {name: [] for name in TASKS})
    assert open_tasks(["local_choice"], str(tmp_path))
    with pytest.raises(ValueError, match="no task 'local'; there are local_choice, local_continuation, local_rolling"):
        open_tasks(["local_choice", "local"], str(tmp_path))
