"""A script as the main program: the same module, arguments, paths, exits and tracebacks as with plain Python."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnres_compile.errors import TargetError
from attnres_compile.running import script
from attnres_compile.running.traces import without_our_frames


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what a script changes is put back."""
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, list(value) if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("package", "broken"):
        sys.modules.pop(name, None)


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


SHOW = """
'''A doc.'''
from __future__ import annotations
import sys, pickle, dataclasses, typing
@dataclasses.dataclass
class Point:
    x: int
assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
assert sys.modules["__main__"].Point is Point
assert typing.get_type_hints(Point) == {"x": int}
own = sorted((k, str(v).split(" at 0x")[0]) for k, v in globals().items() if k.startswith("__"))
print(own, sys.argv, sys.path[0], sys.excepthook is sys.__excepthook__)
"""


@pytest.mark.parametrize(
    "call", [["show.py", "--x", "1"], ["sub/show.py"], ["-m", "show", "-x"], ["-m", "package.show"], ["-m", "package"]]
)
def test_what_the_script_sees(folder: Path, call: list[str], capsys: Any) -> None:
    for name in ("sub", "package"):
        (folder / name).mkdir()
    (folder / "package" / "__init__.py").write_text("")
    for place in ("show.py", "sub/show.py", "package/show.py", "package/__main__.py"):
        (folder / place).write_text(SHOW)
    expected = plain(*call)
    assert expected.returncode == 0, expected.stderr
    as_module = call[0] == "-m"
    name, *arguments = call[1:] if as_module else call
    # With a byte-code file or without: the same.
    for _ in range(2):
        assert script.execute(name, arguments, as_module) == script.Ending()
        assert capsys.readouterr().out == expected.stdout


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(None)", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit(True)", 1),
        ("import sys; sys.exit('a text')", 1),
        ("import sys; sys.exit(['a', 'list'])", 1),
        ("raise SystemExit(-1)", -1),
        ("raise SystemExit(256)", 256),
        ("import sys; sys.excepthook = lambda *e: sys.exit(5); 1 / 0", 5),
    ],
)
def test_exits(folder: Path, source: str, code: int, capsys: Any) -> None:
    (folder / "ends.py").write_text(source)
    expected = plain("ends.py")
    ending = script.execute("ends.py", [])
    assert (ending.code, ending.error, ending.interrupted) == (code, None, False)
    assert expected.returncode == code & 0xFF
    assert capsys.readouterr().err == expected.stderr


CHAINED = """
def inner():
    raise KeyError('inner')
def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError('outer') from error
try:
    outer()
except ValueError:
    raise ExceptionGroup('several', [TypeError('a'), ValueError('b')])
"""


@pytest.mark.parametrize(
    "source",
    [
        "1 / 0",
        CHAINED,
        "def f(:\n    pass",
        "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno, file=sys.stderr)\nx",
        "raise KeyboardInterrupt",
        "raise RuntimeError",
        "class Own(BaseException): pass\nraise Own('x')",
        "def f(): f()\nimport sys; sys.setrecursionlimit(120)\nf()",
    ],
)
def test_tracebacks_are_those_of_plain_python(folder: Path, source: str, capsys: Any) -> None:
    (folder / "fails.py").write_text(source)
    expected = plain("fails.py")
    limit = sys.getrecursionlimit()
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setrecursionlimit, limit)
        ending = script.execute("fails.py", [])
    assert ending.code == 1
    assert ending.interrupted == ("KeyboardInterrupt" in source)
    found = capsys.readouterr().err
    if "setrecursionlimit" in source:
        assert found.splitlines()[-1] == expected.stderr.splitlines()[-1]
    else:
        assert found == expected.stderr


def test_a_hook_that_fails_shows_both_errors(folder: Path, capsys: Any) -> None:
    (folder / "fails.py").write_text(
        "import sys\ndef hook(*e): raise ValueError('in the hook')\nsys.excepthook = hook\n1 / 0"
    )
    expected = plain("fails.py")
    script.execute("fails.py", [])
    assert capsys.readouterr().err.split() == expected.stderr.split()


def test_debugging_keeps_our_frames(folder: Path, capsys: Any) -> None:
    (folder / "fails.py").write_text("1 / 0")
    script.execute("fails.py", [], keep_frames=True)
    assert "running/script.py" in capsys.readouterr().err


def test_frames_of_somebody_else_stay() -> None:
    def raises() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as caught:
        raises()
    before = [entry.name for entry in caught.traceback]
    without_our_frames(caught.value)
    trace, names = caught.value.__traceback__, []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == before


def test_what_is_no_script(folder: Path) -> None:
    (folder / "train.py").write_text("")
    for name, words in {
        "trian.py": "trian.py does not exist. Did you mean train.py?",
        "no/train.py": "does not exist",
        ".": "is a folder, not a script",
        "torch.hub": "attnres run -m torch.hub",
    }.items():
        with pytest.raises(TargetError, match=words.replace("?", r"\?")):
            script.check(name)
    script.check("train.py")


@pytest.mark.parametrize("name", ["no_such_module", "json.nothing", "json", "..x", "attnres_compile.nothing.deeper"])
def test_what_is_no_module(folder: Path, name: str) -> None:
    with pytest.raises(TargetError, match=r"module|package"):
        script.execute(name, [], as_module=True)


def test_a_package_that_fails_is_the_scripts_failure(folder: Path, capsys: Any) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "__init__.py").write_text("import not_installed_anywhere")
    (folder / "broken" / "train.py").write_text("")
    ending = script.execute("broken.train", [], as_module=True)
    assert isinstance(ending.error, ModuleNotFoundError)
    assert "not_installed_anywhere" in capsys.readouterr().err
