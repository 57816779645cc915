"""Programs that start their ranks themselves: `mp.spawn(train, args, nprocs=…)` runs this rank's share, here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism_tools.capture.session import Session


def install(session: Session) -> None:
    """Let torch.multiprocessing.spawn call its function in this process, once, where it would start a process for each rank.

    RuntimeError, in the program, if the function made no process group: then the processes were no ranks.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    own = os.getpid()

    def inside(original: Callable) -> Callable:
        def start(
            fn: Callable, args: tuple = (), nprocs: int = 1, join: bool = True, *more: Any, **options: Any
        ) -> Any:
            # As many as a node has ranks, before there are groups; others are the program's own.
            if nprocs != int(os.environ["LOCAL_WORLD_SIZE"]) or dist.is_initialized() or not join or os.getpid() != own:
                return original(fn, args, nprocs, join, *more, **options)
            groups = len(session.slots)
            fn(int(os.environ["LOCAL_RANK"]), *args)
            if len(session.slots) == groups:
                raise RuntimeError(
                    f"prism: mp.spawn of {nprocs} processes, as many as a node has ranks, was taken for the start of the "
                    "ranks, but no process group was made; give --nproc-per-node otherwise"
                )
            return None

        return start

    mp.spawn = inside(mp.spawn)
    mp.start_processes = inside(mp.start_processes)
