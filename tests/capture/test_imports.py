"""Which installed modules are imported once before ranks are forked, and which are left to the ranks."""

import pytest

from prism_tools.capture.imports import modules_of

COUNTED = """
import os
with open(os.environ["OMP_IMPORTED"], "a") as log:
    log.write("imported\\n")
"""
THREADED = """
import threading
started = threading.Event()
def wait():
    started.set()
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
started.wait()
"""
PROGRAM = """
import counted, threaded
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"check rank {dist.get_rank()} {threaded.threading.active_count()}\\n", end="", flush=True)
dist.barrier()
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of installed packages, and one for the program."""
    for name, text in {"counted.py": COUNTED, "threaded.py": THREADED}.items():
        (tmp_path / name).write_text(text)
    package = tmp_path / "framework"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_is_found(installed, bench):
    (bench.out / "helper.py").write_text("import counted\nfrom framework import parts\n")
    (bench.out / "train.py").write_text(
        "from __future__ import annotations\nimport os, torch.nn, missing\nfrom helper import x\n"
        "try:\n    import framework.parts as p\nexcept ImportError:\n    pass\n"
        "def later():\n    import threaded\n"
        "if __name__ == '__main__':\n    import threaded\n"
    )
    found = ["framework.parts", "counted", "framework", "framework.parts"]
    for command in (["train.py", "--x"], ["-m", "train"]):
        assert modules_of(command, str(bench.out)) == list(dict.fromkeys(found))
    (bench.out / "train.py").write_text("import (")
    assert modules_of(["train.py"], str(bench.out)) == []


def test_the_program_s_own_modules_are_left_to_it(installed):
    (installed / "main.py").write_text("import counted, framework.parts\n")
    assert modules_of(["main.py"], str(installed)) == []


def test_once_for_all_ranks_and_threads_for_each(installed, bench):
    """One try and one import; a module that starts a thread, in every rank."""
    (bench.out / "train.py").write_text(PROGRAM)
    log = bench.out / "imported"
    done = bench.run(
        "record", "-n", 4, "-o", "run.h5", "--", "train.py", PYTHONPATH=str(installed), OMP_IMPORTED=str(log)
    )
    assert done.lines("check") == [f"check rank {rank} 2" for rank in range(4)]
    assert log.read_text().splitlines() == ["imported"] * 2


def test_a_module_that_interrupts_is_left_to_the_ranks(installed, bench):
    """The child that tries ends there, and does nothing of what the tool has yet to do."""
    (installed / "interrupts.py").write_text("raise KeyboardInterrupt\n")
    (bench.out / "train.py").write_text(
        "import counted\n"
        "try:\n    import interrupts\nexcept KeyboardInterrupt:\n    print('check rank 0 went on', flush=True)\n"
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    )
    log = bench.out / "imported"
    done = bench.run(
        "record", "-n", 1, "-o", "run.h5", "--", "train.py", PYTHONPATH=str(installed), OMP_IMPORTED=str(log)
    )
    assert (done.stderr, done.lines("check")) == ("", ["check rank 0 went on"])
    assert log.read_text().splitlines() == ["imported"] * 2
