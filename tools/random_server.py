"""A server on a model of true size with random weights, to measure serving without the weights.

    python tools/random_server.py gemma-4-31b --dtype fp8-w8a8 --slots 64 --max-len 1024 --port 8000

Prompts are token ids (`tools/load.py` sends these); texts mean nothing. Runs until it is killed.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import threading

import tokenizers

from drafters import registry
from serve.api import create_app
from serve.lifecycle import Lifecycle
from serve.runner import EngineRunner
from serve.server import Server
from specdec.assembly.engine import serving_engine
from specdec.assembly.model import random_model
from specdec.core.config import ModelConfig, PrefixConfig
from targets.tokenizer import Tokenizer


def with_words(small: Tokenizer, size: int) -> Tokenizer:
    """mini's tokenizer with a word for each further id: a token without text makes no event, and
    gaps between events would then not be those between tokens."""
    file = json.loads(small.to_json())
    file["model"]["vocab"] |= {f"w{number}": number for number in range(small.vocab_size, size)}
    large = copy.copy(small)
    large._backend = tokenizers.Tokenizer.from_str(json.dumps(file))
    large.vocab_size = large.model_vocab_size = size
    return large


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="such as gemma-4-31b")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", help="cpu: the references, for tests")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--k", type=int, default=0)
    parser.add_argument("--prefix-cache", action="store_true", help="keep prompts; off by default")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def main() -> None:
    asked = options()
    names = "backend", "device", "dtype", "kv_dtype", "slots", "max_len"
    config = ModelConfig(asked.name, **{name: getattr(asked, name) for name in names})
    speculation = registry.resolved(
        registry.config_type()(drafter=asked.drafter, k=asked.k), config, random=True
    )
    model = random_model(asked.name, config, speculation)
    prefix = PrefixConfig(prefix_cache=asked.prefix_cache)
    engine = serving_engine(model, speculation, 1024, prefix)
    lifecycle = Lifecycle()
    tokenizer = with_words(model.tokenizer, model.target.vocab)
    app = create_app(EngineRunner(engine), tokenizer, asked.name, lifecycle=lifecycle)
    with (
        socket.create_server(("127.0.0.1", asked.port)) as listener,
        Server(listener, lifecycle) as server,
    ):
        server.open(app)
        print(f"serving {asked.name} with random weights on port {asked.port}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
