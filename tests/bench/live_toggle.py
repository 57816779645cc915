"""Runs a program under prism-record --live with tracing on in even steps only, so that one process shows what it costs.

prism-record --live ... -- torchrun ... live_toggle.py PROGRAM [ARGUMENT ...]
"""

import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from prism_tools.capture import session

steps = 0
kept = None


def toggle(*_):
    """After step k: on for step k + 1 if that is even. Begins when the device is known."""
    global steps, kept
    live = session.SESSION
    steps += 1
    if kept is None:
        kept = live.device
    if kept is not None:
        live.tracing = steps % 2 == 0
        live.device = kept if live.tracing else None
        kept._stamps._lib.prism_switch(int(live.tracing))


if __name__ == "__main__":
    register_optimizer_step_post_hook(toggle)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
