"""Continues text with a trained checkpoint, or token ids with released weights.

python -m k3jax.generate --checkpoint runs/nano --prompt "def main(" --max-new 200
python -m k3jax.generate --hf DIR --ids prompts.npy --greedy --max-new 32 --out continued.npy
"""

import os
import pathlib

import numpy as np
from absl import app, flags

from k3jax import runtime
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.data.tokenizers import make_tokenizer
from k3jax.hf import load_hf
from k3jax.model.weights import Weights
from k3jax.sampling import Sampling, generate
from k3jax.token_file import read_ids


def _text(args: flags.FlagValues, sampling: Sampling) -> None:
    """Continues ``--prompt`` with a trained checkpoint, and prints each with its continuation."""
    with Checkpoints(pathlib.Path(args.checkpoint), create=False) as checkpoints:
        config, state = checkpoints.load()
    tokenizer = make_tokenizer(config.tokenizer)
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in args.prompt]
    new = generate(
        config.model, state.weights, prompts, max_new=args["max-new"].value, sampling=sampling, stop=tokenizer.eos
    )
    for text, tokens in zip(args.prompt, new):
        print(text + tokenizer.decode([token for token in tokens if token < tokenizer.size]))


def _ids(args: flags.FlagValues, sampling: Sampling) -> None:
    """Continues ``--ids`` with released weights, and prints or writes the new ids."""
    ids = read_ids(args.ids)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{args.ids} must hold integers [T] or [B, T], got {ids.dtype} {list(ids.shape)}")
    if args.out and (os.path.isdir(args.out) or not os.path.isdir(os.path.dirname(args.out) or ".")):
        raise ValueError(
            f"--out {args.out}: there cannot be a file of this name; is it a folder, or its folder missing?"
        )
    model, params, router = load_hf(args.hf, dtype=args.dtype)
    new = generate(model, Weights(params, router), np.atleast_2d(ids), max_new=args["max-new"].value, sampling=sampling)
    if args.out:
        with open(args.out, "wb") as file:
            np.save(file, np.array(new, np.int32))
    else:
        for row in new:
            print(*row)


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    runtime.start()
    args = flags.FLAGS
    if bool(args.checkpoint) == bool(args.hf):
        raise app.UsageError("give one of --checkpoint RUN and --hf DIR")
    if args.checkpoint and not args.prompt:
        raise app.UsageError("--checkpoint needs --prompt TEXT")
    if args.hf and not args.ids:
        raise app.UsageError("--hf needs --ids FILE.npy")
    if args.checkpoint and (args.ids or args.out):
        raise app.UsageError("--ids and --out go with --hf; --checkpoint continues --prompt and prints")
    if args.hf and args.prompt:
        raise app.UsageError("--prompt goes with --checkpoint; --hf continues --ids")
    try:
        sampling = Sampling(0.0 if args.greedy else args.temperature, args["top-p"].value, args.seed)
        (_text if args.checkpoint else _ids)(args, sampling)
    except (ValueError, OSError, CheckpointError) as error:
        raise SystemExit(f"k3jax.generate: {error}") from error


if __name__ == "__main__":
    flags.DEFINE_string("checkpoint", None, "a run folder written by k3jax.train")
    flags.DEFINE_string("hf", None, "a folder in the released Hugging Face format")
    flags.DEFINE_multi_string("prompt", None, "text to continue; repeat the flag for a batch (with --checkpoint)")
    flags.DEFINE_string("ids", None, "a .npy file of token ids [T] or [B, T] to continue (with --hf)")
    flags.DEFINE_string("out", None, "a .npy file to write the new ids to, [B, max_new] (with --ids)")
    flags.DEFINE_integer("max-new", 200, "tokens to add at the most", lower_bound=0)
    flags.DEFINE_bool("greedy", False, "take the most likely token each time")
    flags.DEFINE_float("temperature", 1.0, "divides the logits", lower_bound=0.0)
    flags.DEFINE_float("top-p", 1.0, "keep the most likely tokens up to this probability mass")
    flags.DEFINE_integer("seed", 0, "of the sampling noise")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the computation (with --hf)")
    app.run(main)
