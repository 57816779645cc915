"""make install and make uninstall: what is there afterwards, what works, and what is left alone."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from prism_tools import __version__
from tests.install.tree import bare_environment, make
from tests.tools import LIMIT, ROOT

TOOLS = [f"prism-{tool}" for tool in ("calibrate", "inspect", "record", "replay", "slice")]


def call(*words, cwd):
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=bare_environment(), capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def below(folder):
    """Every path below ``folder``, and what it holds."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_what_is_installed(installed):
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    outside = {name for name in files if not name.startswith("lib/prism-tools/")}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    shared = {
        f"{folder}/{Path(name).name}"
        for folder, text in setup["options.data_files"].items()
        for pattern in text.split()
        for name in ROOT.glob(pattern)
    }
    assert {"share/man/man1/prism-record.1", "share/prism/make/prism.mk"} < shared
    modulefiles = {f"share/modulefiles/prism-tools/{__version__}{end}" for end in ("", ".lua")}
    assert outside == shared | modulefiles | {f"bin/{tool}" for tool in TOOLS}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (installed / "bin").iterdir()}
    assert modes == dict.fromkeys(TOOLS, 0o755)
    assert (installed / "share/prism/slurm/pipeline.sh").stat().st_mode & 0o777 == 0o755  # called by its name


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_run_by_name_and_by_link(installed, tool, tmp_path):
    (tmp_path / "link").symlink_to(installed / "bin" / tool)
    assert call(tmp_path / "link", "--version", cwd=tmp_path) == f"{tool} {__version__}\n"


def test_the_package_is_its_own(installed, tmp_path):
    python = installed / "lib/prism-tools/bin/python"
    place = call(python, "-c", "import prism_tools; print(prism_tools.__file__)", cwd=tmp_path)
    assert place.startswith(f"{installed}/lib/prism-tools/")


def test_staged_moved_replaced_and_removed(tmp_path):
    stage, root = tmp_path / "stage", tmp_path / "stage/opt/prism"
    (root / "share/man/man1").mkdir(parents=True)
    (root / "share/man/man1/other.1").write_text("somebody's")
    before = below(root)
    where = (f"DESTDIR={stage}", "PREFIX=/opt/prism")
    make("install", *where)
    texts = {path: path.read_text() for path in [*root.glob("share/modulefiles/*/*"), *root.glob("bin/*")]}
    scripts = [path for path in root.glob("lib/prism-tools/bin/*") if not path.is_symlink()]
    texts |= {path: path.read_text() for path in [*scripts, root / "lib/prism-tools/pyvenv.cfg"]}
    assert [path for path, text in texts.items() if str(stage) in text] == []
    assert sum("/opt/prism" in text for text in texts.values()) >= 2 + len(TOOLS)

    old = root / "share/man/man1/prism-old.1"  # an older version had it
    old.touch()
    with open(root / "lib/prism-tools/installed", "a") as manifest:
        manifest.write("share/man/man1/prism-old.1\n")
    make("install", *where)
    assert not old.exists()

    moved = tmp_path / "moved away"
    shutil.move(root, moved)
    assert call(moved / "bin/prism-inspect", "--version", cwd=tmp_path) == f"prism-inspect {__version__}\n"
    (moved / "share/prism/examples/mine.py").write_text("a user's")
    make("uninstall", f"PREFIX={moved}")
    mine = {Path("share/prism"): None, Path("share/prism/examples"): None}
    assert below(moved) == before | mine | {Path("share/prism/examples/mine.py"): b"a user's"}


def test_a_failure_leaves_nothing(tmp_path):
    said = make("install", f"PREFIX={tmp_path / 'new'}", expect=2, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="1")
    assert "make install: what stands above says why; nothing was installed\n" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path):
    tool = tmp_path / "bin/prism-slice"
    tool.parent.mkdir()
    tool.write_text("pip's")
    said = make("install", f"PREFIX={tmp_path}", expect=2)
    assert f"make install: {tool}: is there already, and not from make install; remove it, or choose PREFIX=\n" in said
    said = make("uninstall", f"PREFIX={tmp_path}", expect=2)
    assert (
        f"make uninstall: {tmp_path}: nothing here is from make install; give the PREFIX (and DESTDIR) of then\n"
        in said
    )
    assert below(tmp_path) == {Path("bin"): None, Path("bin/prism-slice"): b"pip's"}
    said = make("install", f"PREFIX={tool}/below", expect=2)
    assert "Not a directory; choose another PREFIX=\n" in said
