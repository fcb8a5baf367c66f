"""Programs that are compiled in a third of the time and run four times as long: right for random
models as tiny as the tests', wrong for what is proved of programs as users have them."""

from __future__ import annotations

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""The same for a process of its own, as XLA_FLAGS."""
