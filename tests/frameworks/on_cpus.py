"""Runs a program that needs CUDA and NCCL on CPUs without recording it: ``torchrun … on_cpus.py PROGRAM [argument ...]``.

Only devices are pretended, as by ``prism-record --pretend-cuda``. Processes, store and groups are torch's, and gloo communicates.
"""

import importlib
import os
import runpy
import sys
from types import SimpleNamespace

import torch.distributed.distributed_c10d as c10d

from prism_tools.capture import pretend_cuda, session
from prism_tools.capture.pretend_device import on_cpu
from prism_tools.capture.ranks import PRELOAD


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    session.SESSION = SimpleNamespace(is_remote=lambda ranks: False, pending_ranks=None)  # type: ignore[assignment]
    pretend_cuda.install()
    backend_of = c10d.ProcessGroup._get_backend
    c10d.ProcessGroup._get_backend = lambda group, device: backend_of(group, on_cpu(device))  # type: ignore[method-assign]
    # Where a device is bound, groups are split from others, and this is NCCL's alone.
    c10d.ProcessGroup.bound_device_id = property(lambda group: None, lambda group, device: None)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
