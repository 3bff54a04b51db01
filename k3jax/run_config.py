"""Everything that decides a training run: model, optimizer, data and the numbers of the loop."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from k3jax.config import ModelConfig, require, require_choice, require_positive
from k3jax.config_data import Bytes, Packing, Source, Stream, Tokenizer, reads_text
from k3jax.config_optim import Optimizer
from k3jax.data import ByteTokenizer

SpikeAction = Literal["skip", "stop"]


@dataclass(frozen=True)
class SpikeGuard:
    """When a loss counts as a spike, and what is done about it (`k3jax.guard.judge` has the rule).

    Attributes:
      threshold: robust standard deviations above the median of the remembered losses.
      window: applied steps whose losses are remembered.
      min_history: remembered losses before anything can be a spike.
      floor: smallest deviation, nats: losses that hardly differ must not make a spike of a ripple.
      action: 'skip' the step, or 'stop' the run with the step not applied.
    """

    threshold: float = 10.0
    window: int = 64
    min_history: int = 32
    floor: float = 0.05
    action: SpikeAction = "skip"

    def __post_init__(self):
        require_positive(self, "window", "min_history")
        require(self.threshold > 0, f"SpikeGuard.threshold = {self.threshold}, but it must be above zero")
        require(self.floor > 0, f"SpikeGuard.floor = {self.floor}, but it must be above zero")
        require(
            self.min_history <= self.window,
            f"SpikeGuard.min_history = {self.min_history}, but it must not exceed window = {self.window}",
        )
        require_choice(self, "action", SpikeAction)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay on disk: the last ``last``, every one at a multiple of ``every`` steps, and the ``best``
    ones by held-out bits per byte (of those saved at a step with an evaluation)."""

    last: int = 2
    every: int | None = None
    best: int = 0

    def __post_init__(self):
        require_positive(self, "last")
        if self.every is not None:
            require_positive(self, "every")
        require(self.best >= 0, f"Keep.best = {self.best}, but it must not be negative")


@dataclass(frozen=True)
class Stage:
    """From step ``start`` on: rows of ``seq_len`` tokens, ``batch`` of them a step, and other data if given."""

    start: int
    seq_len: int
    batch: int
    micro_batches: int = 1
    data: Source | None = None

    def __post_init__(self):
        require_positive(self, "start", "seq_len", "batch", "micro_batches")
        _require_division("Stage", self)


def _require_division(name: str, config: "TrainConfig | Stage") -> None:
    require(
        config.batch % config.micro_batches == 0,
        f"{name}.micro_batches = {config.micro_batches}, but it must divide batch = {config.batch}",
    )


@dataclass(frozen=True)
class TrainConfig:
    """One training run. It says what is trained, never where: devices and folders belong to the command.

    Attributes:
      model, optimizer, data: the parts.
      seq_len: tokens of a row.
      tokenizer, packing: how text becomes tokens, and documents become rows.
      batch: rows of an optimizer step, over all devices and micro-batches.
      steps: optimizer steps of the whole run; the learning rate schedule spans them.
      micro_batches: equal parts that the rows of a step are split into, one after the other, to save memory.
      seed: of the initial weights and of the order of the data.
      log_every: steps between metric lines.
      eval_every: steps between evaluations on held-out text; there is always one at the end.
      eval_bytes: held-out bytes of a periodic evaluation, None for all of them; the one at the end reads all.
      checkpoint_every: steps between checkpoints; there is always one at the end.
      keep: which checkpoints stay.
      stages: later parts of the run with other row lengths or data, in order. Tokens per step are the same in all.
      max_skipped: steps in a row that may be skipped as not finite or as spikes; one more stops the run.
      spikes: the guard against loss spikes, or None.
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
    tokenizer: Tokenizer = field(default=Bytes())
    packing: Packing = field(default=Stream())
    micro_batches: int = 1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_bytes: int | None = None
    checkpoint_every: int = 500
    keep: Keep = Keep()
    stages: tuple[Stage, ...] = ()
    max_skipped: int = 3
    spikes: SpikeGuard | None = SpikeGuard()
    loss_chunk: int = 128
    z_loss: float = 0.0
    sample_prompt: str = "def "
    sample_tokens: int = 256

    def __post_init__(self):
        require_positive(self, "seq_len", "batch", "steps", "micro_batches", "loss_chunk")
        require_positive(self, "log_every", "eval_every", "checkpoint_every")
        if self.eval_bytes is not None:
            require_positive(self, "eval_bytes")
        _require_division("TrainConfig", self)
        require(self.max_skipped >= 0, f"TrainConfig.max_skipped = {self.max_skipped}, but it must not be negative")
        self._check_stages()
        require(0 <= self.seed < 2**32, f"TrainConfig.seed = {self.seed}, but it must lie in 0..2**32-1")
        require(self.z_loss >= 0, f"TrainConfig.z_loss = {self.z_loss}, but it must not be negative")
        require(
            self.sample_tokens >= 0, f"TrainConfig.sample_tokens = {self.sample_tokens}, but it must not be negative"
        )
        bytes_read = isinstance(self.tokenizer, Bytes) and reads_text(self.data)
        require(
            self.model.vocab >= ByteTokenizer.size or not bytes_read,
            f"TrainConfig.model.vocab = {self.model.vocab}, but the byte tokenizer has {ByteTokenizer.size} tokens",
        )

    def _check_stages(self) -> None:
        before = 0
        for number, stage in enumerate(self.stages):
            name = f"TrainConfig.stages[{number}]"
            require(
                before < stage.start < self.steps,
                f"{name}.start = {stage.start}, but it must lie after {before} and before the last step {self.steps}",
            )
            tokens = stage.batch * stage.seq_len
            require(
                tokens == self.tokens_per_step,
                f"{name} has batch x seq_len = {stage.batch} x {stage.seq_len} = {tokens} tokens a step, but the run "
                f"has {self.batch} x {self.seq_len} = {self.tokens_per_step}; they must be the same in every stage",
            )
            before = stage.start

    def stage_number(self, step: int) -> int:
        """0 for a step before the first of ``stages``, then 1 and so on. ``step`` counts the steps already made."""
        return sum(stage.start <= step for stage in self.stages)

    @property
    def last_stage(self) -> int:
        """The number of the last stage; the first is 0."""
        return len(self.stages)

    def bounds(self, stage: int) -> tuple[int, int]:
        """After which step a stage begins, and its last step."""
        starts = (0, *(later.start for later in self.stages), self.steps)
        return starts[stage], starts[stage + 1]

    def at(self, stage: int) -> "TrainConfig":
        """This run with the row length, batch, micro-batches and data of a stage by number."""
        if stage == 0:
            return self
        chosen = self.stages[stage - 1]
        return dataclasses.replace(
            self,
            seq_len=chosen.seq_len,
            batch=chosen.batch,
            micro_batches=chosen.micro_batches,
            data=chosen.data or self.data,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, padding included."""
        return self.steps * self.tokens_per_step
