"""Installs the tools below a prefix, in a virtual environment of their own, and takes away exactly what it installed."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = Path("lib/prism-tools")  # the virtual environment, below the prefix
MANIFEST = HOME / "installed"  # what lies outside HOME, one path below the prefix a line; made folders end in "/"
SOURCES = ("prism_tools", "bin", "share", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
MODULEFILES = {"share/modulefiles/prism-tools.lua": "{}.lua", "share/modulefiles/prism-tools.tcl": "{}"}
LAUNCHER = """#!/bin/sh
self=$(readlink -f -- "$0")
home=${{self%/bin/*}}/{home}
exec "$home/bin/python" "$home/bin/{tool}" "$@"
"""  # finds its own place: the tree may be moved, and staged in DESTDIR


class Refused(Exception):
    """Why nothing is installed or removed: "object: problem; remedy"."""


def files_of(prefix: Path) -> dict[Path, tuple[str | Path, int]]:
    """Every file outside HOME: path below the prefix -> text, or the file to copy; mode. ``prefix``: the final one."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    files: dict[Path, tuple[str | Path, int]] = {}
    for folder, patterns in setup["options.data_files"].items():
        for source in (path for pattern in re.split(r"[,\s]+", patterns.strip()) for path in ROOT.glob(pattern)):
            files[Path(folder) / source.name] = source, 0o755 if os.access(source, os.X_OK) else 0o644
    for script in setup["options"]["scripts"].split():
        files[Path(script)] = LAUNCHER.format(home=HOME, tool=Path(script).name), 0o755
    for template, name in MODULEFILES.items():
        text = (ROOT / template).read_text().replace("@PREFIX@", str(prefix)).replace("@VERSION@", _version())
        files[Path("share/modulefiles/prism-tools") / name.format(_version())] = text, 0o644
    return files


def install(stage: Path, prefix: Path, torch: str) -> None:
    """Install below ``stage``, to be run below ``prefix`` (the same without DESTDIR), in place of an older installation."""
    files = files_of(prefix)
    if (stage / MANIFEST).exists():
        uninstall(stage)
    for path in (HOME, *files):
        if os.path.lexists(stage / path):
            raise Refused(f"{stage / path}: is there already, and not from make install; remove it, or choose PREFIX=")
    made = [folder for folder in _folders(files) if not (stage / folder).exists()]
    try:
        (stage / HOME).mkdir(parents=True)
        lines = [f"{folder}/" for folder in made] + [str(path) for path in files]
        (stage / MANIFEST).write_text("".join(f"{line}\n" for line in lines))
        _make_environment(stage / HOME, prefix / HOME, torch)
        for path, (content, mode) in files.items():
            (stage / path).parent.mkdir(parents=True, exist_ok=True)
            (stage / path).write_bytes(content.read_bytes() if isinstance(content, Path) else content.encode())
            (stage / path).chmod(mode)
    except BaseException:
        if (stage / MANIFEST).exists():
            uninstall(stage)
        raise


def uninstall(stage: Path) -> None:
    """Remove what was installed below ``stage``, and the folders that were made for it where nothing else is in them."""
    if not (stage / MANIFEST).exists():
        raise Refused(f"{stage}: nothing here is from make install; give the PREFIX (and DESTDIR) of then")
    lines = (stage / MANIFEST).read_text().splitlines()
    for line in lines:
        if not line.endswith("/"):
            (stage / line).unlink(missing_ok=True)
    shutil.rmtree(stage / HOME)
    for line in sorted((line for line in lines if line.endswith("/")), key=len, reverse=True):
        try:
            (stage / line).rmdir()
        except OSError:
            pass  # someone else's files are in it, or it is gone


def _folders(files: dict[Path, tuple[str | Path, int]]) -> list[Path]:
    """The prefix (".") and all folders below it that hold something of ours, HOME aside."""
    return sorted({folder for path in (HOME, *files) for folder in path.parents})


def _make_environment(home: Path, final: Path, torch: str) -> None:
    """The virtual environment in ``home``, to be run in ``final``: over this Python's packages if torch is among them."""
    site = _has("torch")
    options = ["--system-site-packages"] if site else []
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(home)], check=True)
    if site and sys.prefix != sys.base_prefix:  # venv looks past the environment it is made from
        packages = next(home.glob("lib/python*/site-packages"))
        (packages / "parent.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    with tempfile.TemporaryDirectory() as folder:  # building leaves files beside the sources
        for name in SOURCES:
            if (ROOT / name).is_dir():  # in whose caches others may be writing
                shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, Path(folder) / name)
        wanted = [folder] if site else [folder, torch]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin/python")]
        subprocess.run([*pip, "install", "-q", *wanted], check=True)
    for path in [home / "pyvenv.cfg", *(home / "bin").iterdir()]:
        if not path.is_symlink() and str(home) in (text := path.read_text()):
            path.write_text(text.replace(str(home), str(final)))


def _has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _version() -> str:
    return re.findall(r'__version__ = "(.+)"', (ROOT / "prism_tools/__init__.py").read_text())[0]


def main(argv: list[str]) -> int:
    """install or uninstall, as the Makefile asks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make")
    parser.add_argument("action", choices=("install", "uninstall"))
    for name in ("prefix", "destdir", "torch"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(argv)
    prefix = Path(os.path.abspath(os.path.expanduser(options.prefix)))
    stage = Path(os.path.abspath(f"{options.destdir}{prefix}")) if options.destdir else prefix
    os.umask(0o022)  # others shall use it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half installed is removed
    try:
        if options.action == "uninstall":
            uninstall(stage)
        elif importlib.util.find_spec("pip") is None:
            raise Refused(f"{sys.executable}: has no pip; on Debian: apt install python3-pip, or give PYTHON=")
        else:
            install(stage, prefix, options.torch)
            print(f"installed prism-tools {_version()}; module use {prefix}/share/modulefiles")
    except Refused as problem:
        print(f"make {options.action}: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"make {options.action}: {error.filename}: {error.strerror}; choose another PREFIX=", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError:
        print(f"make {options.action}: what stands above says why; nothing was installed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
