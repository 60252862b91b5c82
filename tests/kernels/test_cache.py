"""Text to module by way of the disk: what is run, what is kept, who may reach it, what happens where it cannot be."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import linecache
import os
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnres_compile.errors import KernelError
from attnres_compile.kernels import cache

TEXT = '"""A kernel: \u2265 0."""\n\n\ndef answer():\n    return 42\n'
ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache directory of the test's own, and no memory of earlier tests."""
    monkeypatch.setenv("ATTNRES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_modules", {})
    monkeypatch.setattr(cache, "_temporary", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("attnres_kernel_"):
            del sys.modules[name]
    linecache.clearcache()


def place(tmp_path: Path, text: str = TEXT) -> Path:
    """Where the text must lie."""
    return tmp_path / "cache" / f"attnres_kernel_{hashlib.sha256(text.encode()).hexdigest()}.py"


def again(text: str = TEXT) -> object:
    """``load`` as a new process would."""
    cache._modules.clear()
    return cache.load(text).answer()


def only(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_text_runs_and_lies_on_disk(tmp_path: Path) -> None:
    module = cache.load(TEXT)
    assert module.answer() == 42
    assert Path(module.__file__) == place(tmp_path)
    assert place(tmp_path).read_bytes() == TEXT.encode()
    assert only(tmp_path / "cache") == [place(tmp_path).name]
    assert sys.modules[module.__name__] is module


def test_source_is_found_as_triton_looks_for_it(tmp_path: Path) -> None:
    function = cache.load(TEXT).answer
    assert inspect.getsource(function) == "def answer():\n    return 42\n"
    # Even when the file has become another one or none since: what ran is what is shown.
    place(tmp_path).write_text("def answer():\n    return 1\n")
    linecache.checkcache()
    assert inspect.getsource(function) == "def answer():\n    return 42\n"
    place(tmp_path).unlink()
    linecache.checkcache()
    assert inspect.getsource(function) == "def answer():\n    return 42\n"


def test_equal_texts_are_one_module_and_others_are_not() -> None:
    first = cache.load(TEXT)
    assert cache.load(TEXT) is first
    other = cache.load(TEXT.replace("42", "43"))
    assert other is not first
    assert (first.answer(), other.answer()) == (42, 43)
    assert other.__name__ != first.__name__


def test_threads_get_one_module() -> None:
    text = "import time\ntime.sleep(0.05)\nruns = []\n"
    start, found = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        found.append(cache.load(text))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(module) for module in found}) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\0" * len(content),
        lambda content: content + b"raise SystemExit('planted')\n",
        lambda content: content.replace(b"42", b"41"),
        lambda content: b"\xff\xfe" + os.urandom(300),
    ],
    ids=["truncated", "empty", "zeros", "longer", "changed", "garbage"],
)
def test_a_damaged_file_is_noticed_and_rebuilt(tmp_path: Path, damage) -> None:
    cache.load(TEXT)
    place(tmp_path).write_bytes(damage(TEXT.encode()))
    assert again() == 42
    assert place(tmp_path).read_bytes() == TEXT.encode()
    assert only(tmp_path / "cache") == [place(tmp_path).name]


def test_a_good_file_is_not_written_again(tmp_path: Path) -> None:
    cache.load(TEXT)
    before = place(tmp_path).stat()
    assert again() == 42
    after = place(tmp_path).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_permissions(tmp_path: Path) -> None:
    old = os.umask(0)  # the widest that a user may have set
    try:
        cache.load(TEXT)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE(place(tmp_path).stat().st_mode) == 0o600


def test_a_file_that_others_may_write_is_replaced(tmp_path: Path) -> None:
    cache.load(TEXT)
    place(tmp_path).chmod(0o666)
    assert again() == 42
    assert stat.S_IMODE(place(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [TEXT, "precious"], ids=["the right text", "another file's"])
def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path, content: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text(content)
    (tmp_path / "cache").mkdir(mode=0o700)
    place(tmp_path).symlink_to(victim)
    assert again() == 42
    assert victim.read_text() == content
    assert not place(tmp_path).is_symlink()
    assert place(tmp_path).read_text() == TEXT


def test_a_planted_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    os.mkfifo(place(tmp_path))
    assert again() == 42
    assert place(tmp_path).is_file()


def temporary(caught: list[warnings.WarningMessage], tmp_path: Path) -> Path:
    """The private directory that the one warning names, and that holds the file."""
    (warning,) = caught
    assert "ATTNRES_CACHE_DIR" in str(warning.message)
    folder = Path(str(warning.message).split(" are kept in ")[1].split(" for this process")[0])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / place(tmp_path).name).read_text() == TEXT
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777], ids=oct)
def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
        assert again() == 42  # one warning, one directory
    temporary(caught, tmp_path)
    assert "other users" in str(caught[0].message)
    assert only(tmp_path / "cache") == []


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    real = os.geteuid()
    # The same as seen by a user to whom it does not belong; root may write there all the same.
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with warnings.catch_warnings(record=True) as caught:
        module = cache.load(TEXT)
    assert module.answer() == 42
    assert "belongs to another user" in str(caught[0].message)
    assert only(tmp_path / "cache") == []


def test_a_file_in_the_directory_s_place(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
    temporary(caught, tmp_path)
    assert (tmp_path / "cache").read_text() == "in the way"


def test_a_directory_in_the_file_s_place(tmp_path: Path) -> None:
    place(tmp_path).mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
    temporary(caught, tmp_path)
    assert only(tmp_path / "cache") == [place(tmp_path).name]  # and no unfinished file


def test_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    real = cache.tempfile.mkstemp

    def refuse(*args, dir=None, **kwargs):  # root writes where no one may, so the system call is stood in for
        if Path(dir) == tmp_path / "cache":
            raise OSError(30, "Read-only file system", str(dir))
        return real(*args, dir=dir, **kwargs)

    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
        assert again(TEXT + "# another\n") == 42
    temporary(caught, tmp_path)
    assert "Read-only file system" in str(caught[0].message)


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Root may write anywhere: act as somebody else meanwhile."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_directory_without_write_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not below pytest's own folder, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "cache").mkdir(mode=0o500)
        if os.geteuid() == 0:
            os.chown(folder / "cache", NOBODY, NOBODY)
        monkeypatch.setenv("ATTNRES_CACHE_DIR", str(folder / "cache"))
        with warnings.catch_warnings(record=True) as caught, bound_by_permissions():
            warnings.simplefilter("always")
            assert again() == 42
        temporary(caught, folder)
        assert list((folder / "cache").iterdir()) == []


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if str(tmp_path / "cache") in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
    temporary(caught, tmp_path)
    assert only(tmp_path / "cache") == []


def test_no_place_at_all_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("in the way")

    def refuse(**kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", refuse)
    with pytest.raises(KernelError, match=r"no place to keep generated kernels.*Read-only.*ATTNRES_CACHE_DIR"):
        cache.load(TEXT)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ATTNRES_CACHE_DIR": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/attnres_compile"),
        ({"ATTNRES_CACHE_DIR": "", "XDG_CACHE_HOME": "relative"}, "home/.cache/attnres_compile"),
        ({"ATTNRES_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "home/.cache/attnres_compile"),
        ({"ATTNRES_CACHE_DIR": "~/mine/deep"}, "home/mine/deep"),
    ],
)
def test_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert Path(cache.load(TEXT).__file__).parent == tmp_path / expected


def test_without_a_home_it_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNRES_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with warnings.catch_warnings(record=True) as caught:
        assert again() == 42
    temporary(caught, tmp_path)


def test_a_text_that_does_not_run_is_an_error_and_leaves_no_module() -> None:
    before = set(sys.modules)
    for text in ("def broken(:\n", "1 / 0\n"):
        for _ in range(2):
            with pytest.raises(KernelError, match="does not load"):
                cache.load(text)
    assert {name for name in set(sys.modules) - before if name.startswith("attnres_kernel_")} == set()


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match="pip install triton"):
        cache.load("import triton\n")


RACE = """
import sys
sys.path.insert(0, {root!r})
from attnres_compile.kernels import cache
print("ready", flush=True)
sys.stdin.readline()
for number in range(200):
    text = {text!r} + f"# {{number}}\\n" * (1 + 40 * number)
    assert cache.load(text).answer() == 42
    assert open(cache.load(text).__file__).read() == text
"""


def test_processes_that_make_the_same_kernels_at_once(tmp_path: Path) -> None:
    code = RACE.format(root=str(ROOT), text=TEXT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    call = [sys.executable, "-W", "error", "-c", code]
    processes = [subprocess.Popen(call, env=environment, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    names = only(tmp_path / "cache")
    assert len(names) == 200
    for name in names:
        text = (tmp_path / "cache" / name).read_bytes()
        assert name == f"attnres_kernel_{hashlib.sha256(text).hexdigest()}.py"


def test_a_private_directory_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from attnres_compile.kernels import cache\n"
        f"print(cache.load({TEXT!r}).__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).parent.exists()
