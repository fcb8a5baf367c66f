"""Trained weights to a Hugging Face checkpoint folder.

`python -m recipes.mini.export CONFIG TOKENIZER RUN OUT` writes config.json, model.safetensors
(bf16) and the tokenizer's files; transformers loads the folder unchanged.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

from targets.arch import Arch, parse_arch, read_config
from targets.jax.params import Params, to_tensors
from training.pretrain import initial_state, open_checkpoints, read_config_file, restore

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def trained_params(config: Path, run: Path) -> tuple[Params, Arch, int]:
    """(float32 parameters, architecture, step) of a run's newest checkpoint."""
    recipe = read_config_file(config)
    arch = parse_arch(read_config(Path(recipe.architecture)))
    state = restore(open_checkpoints(run), initial_state(arch, recipe))
    return state.params, arch, int(state.step)


def write_checkpoint(
    params: Params, arch: Arch, architecture: Path, tokenizer: Path, out: Path
) -> None:
    """Write the folder. architecture and tokenizer: folders with config.json and its files."""
    out.mkdir(parents=True, exist_ok=True)
    text_only = read_config(architecture).get("text_config") is None
    prefix = "model." if text_only else "model.language_model."
    tensors = to_tensors(params, arch, prefix)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library writes it for its owner only
    sources = [architecture / "config.json", *(tokenizer / name for name in TOKENIZER_FILES)]
    for source in sources:
        if source.resolve() != (out / source.name).resolve():
            shutil.copyfile(source, out / source.name)


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "tokenizer", "run", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    params, arch, step = trained_params(arguments.config, arguments.run)
    architecture = Path(read_config_file(arguments.config).architecture)
    write_checkpoint(params, arch, architecture, arguments.tokenizer, arguments.out)
    print(json.dumps({"step": step, "out": str(arguments.out)}))


if __name__ == "__main__":
    main()
