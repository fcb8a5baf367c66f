"""`specdec bench` of a random model whose linear layers are rounded to NVFP4, where `--dtype int4`
would round them to integers: the speed of such a file's kernels, without the file.

    PYTHONPATH=. python docs/log/nvfp4.py bench --random gemma-4-31b --backend cuda --dtype int4 ...
"""

from __future__ import annotations

from specdec.__main__ import main
from targets.cuda import int4
from tests.nvfp4_files import as_nvfp4

if __name__ == "__main__":
    int4.quantise = as_nvfp4
    main()
