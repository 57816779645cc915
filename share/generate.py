"""Writes the man pages and completions in share/ from the tools' parsers; --check only says which are not current."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "100"  # argparse wraps at the terminal's width; before any parser is made

SHARE = Path(__file__).resolve().parent
sys.path.insert(0, str(SHARE.parent))
TOOLS = ("record", "slice", "calibrate", "replay", "inspect")
KINDS = {"man": "man/man1", "bash": "bash-completion/completions", "zsh": "zsh/site-functions"}


def _parser(tool: str):
    return importlib.import_module(f"prism_tools.cli.{tool}").get_parser()


def man_page(tool: str) -> str:
    """The man page of prism-``tool`` in groff."""
    from argparse_manpage.manpage import Manpage

    from prism_tools import __version__

    parser = _parser(tool)
    first, _, parser.description = parser.description.partition("\n")
    parser.epilog = None
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        for subparser in action.choices.values():
            subparser.description = None  # its help stands there already
    parser._manpage = [{"heading": heading, "content": _groff(heading, text)} for heading, text in parser.man.items()]
    page = Manpage(parser, format="single-commands-section")
    page.description = first[0].lower() + first[1:].rstrip(".")
    page.date, page.source, page.manual = "", f"prism tools {__version__}", "prism tools"
    return str(page)


def _groff(heading: str, text: str) -> str:
    text = text.replace("\\", "\\\\").replace("-", "\\-")
    return f".nf\n{text}\n.fi" if heading == "EXAMPLES" else text.replace("\n", "\n.br\n")


def completion(tool: str, shell: str) -> str:
    """The completion script of prism-``tool`` for ``shell`` (bash or zsh)."""
    import shtab

    return shtab.complete(_parser(tool), shell=shell)


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    files = {}
    for tool in TOOLS:
        files[SHARE / KINDS["man"] / f"prism-{tool}.1"] = man_page(tool)
        files[SHARE / KINDS["bash"] / f"prism-{tool}"] = completion(tool, "bash")
        files[SHARE / KINDS["zsh"] / f"_prism-{tool}"] = completion(tool, "zsh")
    return files


def stale() -> list[Path]:
    """Generated files that are not current."""
    return [path for path, text in generated().items() if not path.exists() or path.read_text() != text]


def main(argv: list[str]) -> int:
    """Write man pages and completions, or those whose kind (man, completions) is given; --check writes nothing."""
    if argv == ["--check"]:
        for path in stale():
            print(f"{path.relative_to(SHARE.parent)}: not current; run make man completions")
        return int(bool(stale()))
    for path, text in generated().items():
        kind = "man" if path.suffix == ".1" else "completions"
        if not argv or kind in argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
