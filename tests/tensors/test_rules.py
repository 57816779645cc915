"""Rules files: what is refused, in one line with its place, and which rule answers what."""

import pytest

from prism_tools.errors import PrismError
from prism_tools.tensors.rules import Occasion, load, may_be_invented

TOKENS = Occasion(("broadcast",), ("mesh_tp", "3"), 2, "int64", 64, "train.py:41 next_batch")

WRONG = {
    "generate = 'self'": "line 1: generate: is no rule; begin each with [[rule]]",
    "rule = 3": "rule: is no list of tables; begin each with [[rule]]",
    "[[rule]]": "line 1: generate: is missing; say what answers, such as generate = 'self'",
    "[[rule]]\nopp = 'recv'\ngenerate = 'self'": "line 2: opp: is no key of a rule; keys are op, group, ordinal, dtype, size",
    "# a\n\n[[rule]]\n'op' = 'receive'\ngenerate = 'self'": "line 4: op: 'receive' is none of all_reduce, broadcast",
    "[[rule]]\ndtype = 'int'\ngenerate = 'self'": "line 2: dtype: 'int' is none of float32",
    "[[rule]]\ngroup = 3\ngenerate = 'self'": "line 2: group: 3 is no text",
    "[[rule]]\nsize = '=8'\ngenerate = 'self'": "line 2: size: '=8' is no size such as 8, '<=64K' or '>1M'",
    "[[rule]]\nsize = true\ngenerate = 'self'": "line 2: size: True is no size",
    "[[rule]]\nordinal = -1\ngenerate = 'self'": "line 2: ordinal: -1 is no place such as 0, [0, 2], '2-5' or '2-'",
    "[[rule]]\ngenerate = 'self'\n[[rule]]\ngenerate = 'ones'": "line 4: generate: 'ones' is none of self, zeros, splits-zero",
    "[[rule]]\ngenerate = 'self(1)'": "line 2: generate: self takes no values, not 1",
    "[[rule]]\ngenerate = 'constant(\"a\")'": "line 2: generate: 'a' is no number",
    "[[rule]]\ngenerate = 'randint(5)'": "line 2: generate: randint takes 2 values, not 1",
    "[[rule]]\ngenerate = 'randint(5, 5)'": "line 2: generate: 'randint(5, 5)' is no range of whole numbers",
    "[[rule]]\ngenerate = 'object(open(1))'": "line 2: generate: (open(1)) holds more than plain values",
    "[[rule]]\ngenerate = 'from /etc/passwd'": "line 2: generate: '/etc/passwd' is no .npy file beside the rules",
    "[[rule]]\ngenerate = 'python:hooks'": "line 2: generate: 'python:hooks' is not python:MODULE:FUNCTION",
    "[[rule]\ngenerate = 'self'": "is no TOML file: Expected ']]' at the end of an array declaration (at line 1, column 7)",
    '[[rule]]\ngenerate = "\xff': "is no TOML file: ",
    "rule = " + "[" * 3000: "is no TOML file: ",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_files(text, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(PrismError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}: {WRONG[text]}") and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(PrismError, match="none.toml: No such file or directory"):
        load(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("op = 'broadcast'", True),
        ("op = ['recv', 'all_gather']", False),
        ("op = 'broadcast_object_list'", False),
        ("group = 'mesh_*'", True),
        ("group = ['world', '3']", True),
        ("group = 'tp'", False),
        ("ordinal = 2", True),
        ("ordinal = [0, 1]", False),
        ("ordinal = '1-'", True),
        ("ordinal = '3-9'", False),
        ("dtype = ['int32', 'int64']", True),
        ("dtype = 'float32'", False),
        ("size = 64", True),
        ("size = '<64'", False),
        ("size = '<= 1K'", True),
        ("size = '>0.5'", None),
        ("site = '*next_batch'", True),
        ("site = 'train.py:40*'", False),
        ("op = 'broadcast'\ndtype = 'uint8'", False),
    ],
)
def test_conditions(condition, holds, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(f"[[rule]]\n{condition}\ngenerate = 'zeros'\n[[rule]]\ngenerate = 'self'")
    if holds is None:
        with pytest.raises(PrismError):
            load(str(path))
    else:
        assert load(str(path)).find(TOKENS) == (0 if holds else 1)


def test_an_object_call_has_both_names(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text("[[rule]]\nop = 'broadcast_object_list'\ngenerate = 'object(1)'\n")
    rules = load(str(path))
    within = Occasion(("broadcast", "broadcast_object_list"), ("world", "0"), 0, "int64", 8, "")
    assert (rules.find(within), rules.find(TOKENS)) == (0, -1)


@pytest.mark.parametrize(
    ("dtype", "size", "free"), [("float32", 65540, True), ("bfloat16", 65536, False), ("int64", 1 << 20, False)]
)
def test_what_is_never_invented(dtype, size, free):
    assert may_be_invented(Occasion(("recv",), ("pp", "1"), 0, dtype, size, "")) is free
