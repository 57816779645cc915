"""The user's program as something to start: its command line, the environment that goes with it, and the hash seed."""

from __future__ import annotations

import importlib.util
import os
import sys

from prism_tools.errors import PrismError

# Names that a program's behaviour may depend on. A graph file may be shown to others: never pass secrets on.
ALLOWED = (
    "OMP_",
    "MKL_",
    "TORCH",
    "PYTORCH",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "LANG",
    "LC_",
)
FORBIDDEN = ("KEY", "TOKEN", "SECRET", "PASS")
SETS_ITSELF = ("TORCHELASTIC",)  # set per rank by us


def allowed_environment() -> dict[str, str]:
    """The variables that are recorded and set again: allow-listed names only, nothing that looks like a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ALLOWED)
        and not name.startswith(SETS_ITSELF)
        and not any(word in name.upper() for word in FORBIDDEN)
    }


def check_program(command: list[str]) -> None:
    """PrismError (status 127) if there is no such program."""
    if command[0] == "-m":
        name = command[1]
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(name.partition(".")[0])  # a submodule's parents would be imported
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.remove(os.getcwd())
        if found is None:
            raise PrismError(f"no module named {name}", status=127)
    elif not os.path.exists(command[0]):
        raise PrismError(f"{command[0]}: no such program; give a Python script, or -m module", status=127)


def fix_hash_seed() -> int:
    """Make str hashes (the order of sets) the same in every run of the program: PYTHONHASHSEED, 0 where it is not set.

    Restarts this process where hashes are random, so call it before anything has been read. Returns the seed.
    """
    seed = os.environ.get("PYTHONHASHSEED", "random")
    if seed == "random":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
    return int(seed)
