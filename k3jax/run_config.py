"""Everything that decides a training run: model, optimizer, data and the numbers of the loop."""

from dataclasses import dataclass

from k3jax.config import ModelConfig, require, require_positive
from k3jax.config_data import Source
from k3jax.config_optim import Optimizer
from k3jax.data import ByteTokenizer


@dataclass(frozen=True)
class TrainConfig:
    """One training run. It says what is trained, never where: devices and folders belong to the command.

    Attributes:
      model, optimizer, data: the parts.
      seq_len: tokens of a row.
      batch: rows of an optimizer step, over all devices and micro-batches.
      steps: optimizer steps of the whole run; the learning rate schedule spans them.
      micro_batches: equal parts that the rows of a step are split into, one after the other, to save memory.
      seed: of the initial weights and of the order of the data.
      log_every: steps between metric lines.
      eval_every: steps between evaluations on held-out text; there is always one at the end.
      eval_bytes: held-out bytes of a periodic evaluation, None for all of them; the one at the end reads all.
      checkpoint_every: steps between checkpoints; there is always one at the end.
      loss_chunk: positions of a row whose logits exist at a time.
      z_loss: weight of the squared log-partition in the loss.
      sample_prompt, sample_tokens: what the model continues at the end of the run, and for how long (0: no sample).

    Raises:
      ConfigError: a number out of range, or two that do not fit together.
    """

    model: ModelConfig
    optimizer: Optimizer
    data: Source
    seq_len: int
    batch: int
    steps: int
    micro_batches: int = 1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_bytes: int | None = None
    checkpoint_every: int = 500
    loss_chunk: int = 128
    z_loss: float = 0.0
    sample_prompt: str = "def "
    sample_tokens: int = 256

    def __post_init__(self):
        require_positive(self, "seq_len", "batch", "steps", "micro_batches", "loss_chunk")
        require_positive(self, "log_every", "eval_every", "checkpoint_every")
        if self.eval_bytes is not None:
            require_positive(self, "eval_bytes")
        require(
            self.batch % self.micro_batches == 0,
            f"TrainConfig.micro_batches = {self.micro_batches}, but it must divide batch = {self.batch}",
        )
        require(0 <= self.seed < 2**32, f"TrainConfig.seed = {self.seed}, but it must lie in 0..2**32-1")
        require(self.z_loss >= 0, f"TrainConfig.z_loss = {self.z_loss}, but it must not be negative")
        require(
            self.sample_tokens >= 0, f"TrainConfig.sample_tokens = {self.sample_tokens}, but it must not be negative"
        )
        require(
            self.model.vocab >= ByteTokenizer.size,
            f"TrainConfig.model.vocab = {self.model.vocab}, but the byte tokenizer has {ByteTokenizer.size} tokens",
        )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, padding included."""
        return self.steps * self.tokens_per_step
