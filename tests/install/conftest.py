"""A tree that make install made from a copy of the sources that is gone, and Debian's two module systems, unpacked."""

import os
import re
import shutil
import subprocess

import pytest

from tests.install.tree import fetch, make
from tests.tools import ROOT

SOURCES = ("prism_tools", "bin", "share", "slurm", "Makefile", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The prefix of an installation whose sources are gone."""
    folder = tmp_path_factory.mktemp("install")
    source, prefix = folder / "source", folder / "site's" / "prism-tools"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():  # in whose caches other tests may be writing
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, source / name)
    before = sorted(source.rglob("*"))
    make("install", f"PREFIX={prefix}", cwd=source)
    assert sorted(source.rglob("*")) == before  # building left nothing beside the sources
    shutil.rmtree(source)
    return prefix


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """Command lines of Debian's Lmod and environment-modules: {"lmod": […], "tcl": […]}.

    Debian lets only one of them be installed, so both are unpacked in a folder: nothing on the machine changes.
    """
    root = tmp_path_factory.mktemp("modules")
    try:
        fetch(root, "lmod", "environment-modules")
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no packages lmod and environment-modules from Debian here: {error}")
    lmod = next(root.glob("usr/share/lmod/*/libexec/lmod"))
    lua = re.match(r"#!.*/(lua([\d.]+))", lmod.read_text())
    share, libraries = root / "usr/share/lua" / lua[2], next(iter(root.glob(f"usr/lib/*/lua/{lua[2]}")), root)
    places = {"path": f"{share}/?.lua;{share}/?/init.lua;", "cpath": f"{libraries}/?.so;"}
    text = lmod.read_text()  # it names the system's folders; where the packages were there already, these hold them
    for name, own in places.items():
        text = text.replace(f'local sys_lua_{name} = "', f'local sys_lua_{name} = "{own}')
    lmod.write_text(text)
    search = f"{root}/usr/bin{os.pathsep}{os.environ['PATH']}"
    shared = f"LD_LIBRARY_PATH={libraries.parent.parent}"
    tcl = next(root.glob("usr/lib/*/modulecmd.tcl"))
    return {
        "lmod": ["env", shared, shutil.which(lua[1], path=search), str(lmod), "bash"],
        "tcl": ["env", shared, shutil.which("tclsh", path=search), str(tcl), "bash"],
    }
