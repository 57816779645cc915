"""What benches print: one JSON object per figure on standard output, everything else on standard error."""

import json
import os
import sys


def figure(name, value, unit, goal=None, ok=None, baseline=None):
    """Print one figure. `goal`: what `value` is held against, with `ok`; `baseline`: what it should be read beside."""
    rounded = [round(x, 4) if isinstance(x, float) else x for x in (value, goal, baseline)]
    keys = ("name", "value", "unit", "goal", "ok", "baseline")
    print(json.dumps(dict(zip(keys, (name, rounded[0], unit, rounded[1], ok, rounded[2]), strict=True))), flush=True)


def progress(text):
    """One line about what is going on, with the machine's load: other people's work shows in the figures."""
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"bench: {text}  (load {load})", file=sys.stderr, flush=True)
