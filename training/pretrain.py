"""Train a small Gemma 4 from scratch on a token stream: how `targets/mini` was made.

`python -m training.pretrain configs/pretrain-mini.toml CORPUS CHECKPOINT RUN [--seconds S]`

CORPUS holds train.npy and heldout.jsonl, CHECKPOINT the tokenizer files. RUN receives orbax
checkpoints, log.jsonl and run.json; the same command continues where the last one stopped, with
the same bits as if it had not stopped. Weights are float32, arithmetic is bfloat16.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from rich.progress import Progress, TextColumn

from specdec.core.alone import hold_alone
from specdec.core.provenance import run_record
from specdec.core.toml import STRICT, read_recipe_as
from targets.arch import Arch, parse_arch, read_config
from targets.jax.blank_params import init_params
from targets.jax.params import Params
from training.blocks import block_logits
from training.heldout import Windows, heldout_loss, make_scorer, windows_of
from training.optimizer import OptimizerConfig, make_optimizer, schedule
from training.pace import Pace
from training.tokens import BOS, documents, row_starts

WATCHED_CHARACTERS = 400_000  # of held-out text that is scored during training
LOG_EVERY = 20  # steps
State = TypeVar("State", bound=tuple)


@dataclass(frozen=True)
class Phase:
    """`steps` steps of `batch` rows of `length` tokens."""

    steps: int
    batch: int
    length: int
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class PretrainConfig:
    """architecture: folder of a config.json, relative to the working directory."""

    architecture: str
    seed: int
    evaluate_every: int
    save_every: int
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig
    __pydantic_config__ = STRICT

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[int, Phase, int]:
        """(number, phase, step within the phase) of a global step."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, phase, step
            step -= phase.steps
        raise AssertionError("step past the last phase")


class PretrainState(NamedTuple):
    """What a checkpoint holds; `step` is also the position in the data."""

    step: Any
    params: Params
    optimizer: Any


def read_config_file(path: Path) -> PretrainConfig:
    """Parse a TOML recipe. Raises UserError on a missing file and on unknown or missing keys."""
    return read_recipe_as(PretrainConfig, path, "configs/pretrain-mini.toml")


def initial_state(arch: Arch, config: PretrainConfig) -> PretrainState:
    """Fresh weights and optimizer. q_norm and k_norm start at head_dim ** -0.25: Gemma 4 does not
    divide scores by sqrt(head_dim), so norms of 1 would start with saturated attention."""
    params = init_params(arch, jax.random.key(config.seed), jnp.float32)

    def shrink(path: Any, leaf: Any) -> Any:
        is_query_or_key_norm = "q_norm" in str(path[-1]) or "k_norm" in str(path[-1])
        return leaf * leaf.shape[-1] ** -0.25 if is_query_or_key_norm else leaf

    params = jax.tree_util.tree_map_with_path(shrink, params)
    optimizer = make_optimizer(config.optimizer, config.steps)
    return PretrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_step(arch: Arch, config: PretrainConfig, dtype: Any = jnp.bfloat16) -> Any:
    """A compiled (state, stream [N], starts [B], length) -> (state, mean nats per token)."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    # The forward accumulates in float32, so its gradients meet bfloat16 weights as float32; without
    # this, those products run as float32 ones, at a third of the speed.
    precision = "BF16_BF16_F32" if dtype == jnp.bfloat16 else None

    def loss(params: Params, inputs: Any, targets: Any) -> Any:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits = block_logits(cast, arch, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @partial(jax.jit, donate_argnums=0, static_argnames="length")
    def step(
        state: PretrainState, stream: Any, starts: Any, length: int
    ) -> tuple[PretrainState, Any]:
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(stream, (start,), (length,)))
        targets = cut(starts).astype(jnp.int32)
        # <bos> stands first in every row, as it does in every use of the model
        inputs = jnp.concatenate([jnp.full_like(targets[:, :1], BOS), targets[:, :-1]], 1)
        with jax.default_matmul_precision(precision):
            value, gradient = jax.value_and_grad(loss)(state.params, inputs, targets)
        updates, inner = optimizer.update(gradient, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return PretrainState(state.step + 1, params, inner), value

    return step


def open_checkpoints(run: Path) -> ocp.CheckpointManager:
    """Atomic checkpoints under RUN/checkpoints; the last one is kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
    return ocp.CheckpointManager((run / "checkpoints").resolve(), options=options)


def restore(manager: ocp.CheckpointManager, fresh: State) -> State:
    """The newest checkpoint in `fresh`'s structure, or `fresh` itself if there is none."""
    if manager.latest_step() is None:
        return fresh
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
    found: Any = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))
    return found


class Pretrainer:
    """The loop: owns the state, the log and the checkpoints of one RUN folder."""

    def __init__(
        self,
        config: PretrainConfig,
        run: Path,
        stream: np.ndarray,
        watched: Windows,
        dtype: Any = jnp.bfloat16,
    ) -> None:
        self.config, self.run, self.watched = config, run, watched
        run.mkdir(parents=True, exist_ok=True)
        self.arch = parse_arch(read_config(Path(config.architecture)))
        self.stream = jnp.asarray(stream)
        self.manager = open_checkpoints(run)
        self.state = restore(self.manager, initial_state(self.arch, config))
        self._step = make_step(self.arch, config, dtype)
        self._score = make_scorer(self.arch, dtype)
        peak = config.optimizer.learning_rate
        self._rate = schedule(peak, config.optimizer, config.steps)

    def train(self, until: int, seconds: float = float("inf")) -> int:
        """Train up to step `until` or for `seconds`, save, and return the step reached."""
        began, step = time.monotonic(), int(self.state.step)
        pace = Pace(step)
        with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}")) as bar:
            task = bar.add_task("training", total=until, completed=step, note="")
            while step < until and time.monotonic() - began < seconds:
                nats, tokens = self._one(step)
                step += 1
                bar.advance(task)
                if step % LOG_EVERY == 0 or step == until:
                    nats = float(nats)  # waits for the device
                    speed = pace.tokens_per_second(step, tokens)
                    pace.mark(step)
                    self._log(step, train=nats, tokens_per_second=round(speed))
                    bar.update(task, note=f"{nats:.3f} nats, {speed:,.0f} tokens/s")
                if step % self.config.evaluate_every == 0 or step == until:
                    self._evaluate(step)
                    pace.mark(step)
                if step % self.config.save_every == 0:
                    self._save(step)
                    pace.mark(step)
        self._save(step)
        self.manager.wait_until_finished()
        return step

    def _one(self, step: int) -> tuple[Any, int]:
        number, phase, inner = self.config.phase_at(step)
        seed = self.config.seed * 1000 + number
        starts = row_starts(seed, inner, phase.batch, phase.length, len(self.stream))
        self.state, nats = self._step(self.state, self.stream, starts, length=phase.length)
        return nats, phase.batch * phase.length

    def _evaluate(self, step: int) -> None:
        loss = heldout_loss(self._score, self.state.params, self.watched)
        self._log(step, heldout=loss.nats_per_token, bits_per_character=loss.bits_per_character)

    def _save(self, step: int) -> None:
        if self.manager.latest_step() != step:
            self.manager.save(step, args=ocp.args.StandardSave(self.state))

    def _log(self, step: int, **values: float) -> None:
        row = {"step": step, "learning_rate": float(np.asarray(self._rate(step))), **values}
        with (self.run / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")


def watched_windows(corpus: Path, checkpoint: Path, width: int) -> Windows:
    """The first WATCHED_CHARACTERS of held-out documents, cut into windows."""
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts: list[str] = []
    for row in documents(corpus / "heldout.jsonl"):
        texts.append(row["text"])
        if sum(map(len, texts)) > WATCHED_CHARACTERS:
            break
    return windows_of(backend, texts, width)


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "corpus", "checkpoint", "run"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    arguments.run.mkdir(parents=True, exist_ok=True)
    hold_alone(arguments.run, "run")
    config = read_config_file(arguments.config)
    stream = np.load(arguments.corpus / "train.npy")
    watched = watched_windows(arguments.corpus, arguments.checkpoint, config.phases[0].length)
    trainer = Pretrainer(config, arguments.run, stream, watched)
    facts = {"config": asdict(config), "stream_tokens": len(stream)}
    libraries = ("jax", "optax", "orbax-checkpoint")
    record = run_record(jax.devices()[0].device_kind, libraries, **facts)
    (arguments.run / "run.json").write_text(json.dumps(record, indent=1))
    step = trainer.train(config.steps, arguments.seconds)
    print(json.dumps({"step": step, "of": config.steps, "finished": step == config.steps}))


if __name__ == "__main__":
    main()
