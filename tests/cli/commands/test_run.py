"""``attnres run`` on real scripts in processes of their own: all is as with plain Python, and converted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.processes import RUN, attnres, environment

TRAIN = str(Path(__file__).parents[1] / "scripts" / "train_gpt.py")


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, *arguments]
    return subprocess.run(call, env=environment(**more), capture_output=True, text=True, timeout=300)


def losses(stdout: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", stdout)]


# --- a training script on real text


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    page, queries = tmp_path / "page.html", tmp_path / "queries.safetensors"
    options = ["run", "--report", str(page), "--save", str(queries), TRAIN, "--out_dir", str(tmp_path)]
    done = attnres(*options, "--max_iters", "40")
    assert done.returncode == 0, done.stderr
    # Standard output is the script's own.
    shape = r"(step \d+: train loss \d\.\d{6}, val loss \d\.\d{6}\n|iter \d+: loss \d\.\d{6}\n)+"
    assert re.fullmatch(shape, done.stdout)
    found = losses(done.stdout)
    assert found[0] == pytest.approx(5.5, abs=0.3)
    assert found[-1] < 3.5
    said = " ".join(done.stderr.split())
    assert (
        "attnres: converted GPT at its first call (evaluation mode): 8 sublayers, 8 queries, 256 parameters; "
        "added to AdamW, group 2 of 2 (lr 0.001, weight decay 0)" in said
    )
    assert "8 of 8 queries moved from zero" in said
    assert f"attnres: wrote {page}" in done.stderr
    assert "\x1b" not in done.stderr
    html = page.read_text()
    assert "transformer.h.0.ln_2" in html
    assert "no depth weights" not in done.stderr
    saved = load_file(queries)
    assert len(saved) == 8
    assert all(tensor.shape == (32,) and tensor.norm() > 1e-3 for tensor in saved.values())
    checkpoint = torch.load(tmp_path / "ckpt.pt")
    for name, tensor in saved.items():
        assert torch.equal(checkpoint["model"][name], tensor)
    assert [len(group["params"]) for group in checkpoint["optimizer"]["param_groups"]] == [18, 9 + 8]
    # The same command, as a user would resume.
    resumed = attnres("run", "--json", TRAIN, "--out_dir", str(tmp_path), "--init_from", "resume", "--max_iters", "45")
    assert resumed.returncode == 0, resumed.stderr
    document = json.loads(resumed.stdout)
    assert losses(resumed.stderr)[0] == pytest.approx(found[-2], abs=0.25)
    assert document["notes"] == ["8 of the added parameters come from the checkpoint that the script loaded"]
    assert document["converted"]["optimizers"][0]["group"] == 1


def test_queries_at_zero_change_no_loss() -> None:
    """With a learning rate of 0 nothing moves: dropout included, the losses are those of the plain model."""
    arguments = [TRAIN, "--learning_rate", "0", "--max_iters", "11"]
    plain = losses(python(*arguments).stdout)
    assert len(plain) == 9
    for extra in ([], ["--compile", "--backend", "aot_eager"]):
        done = attnres("run", "--gain", "sum", *arguments, *extra)
        assert done.returncode == 0, done.stderr
        assert losses(done.stdout) == pytest.approx(plain, rel=1e-5)
    # The same in the paper's form is another model, so that the comparison compares something.
    other = attnres("run", "--gain", "mean", *arguments)
    assert losses(other.stdout) != pytest.approx(plain, rel=1e-4)


@pytest.mark.inductor
def test_a_compiled_script(tmp_path: Path) -> None:
    done = attnres("run", "--json", TRAIN, "--compile", "--layers", "2", "--max_iters", "11", fresh=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["notes"] == []
    assert all(norm > 0 for norm in document["converted"]["query_norms"].values())
    assert losses(done.stderr)[-1] < 4.8


def test_the_printed_example_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = " ".join(attnres("run", "--help", COLUMNS="200").stdout.split())
    assert "Example: attnres run -m attnres_compile.demo --steps 20" in shown
    done = attnres("run", "-m", "attnres_compile.demo", "--steps", "20")
    assert done.returncode == 0
    assert losses(done.stdout)[-1] < losses(done.stdout)[0] - 1
    assert "8 of 8 queries moved from zero" in done.stderr
    assert max(map(len, done.stderr.splitlines()[1:])) <= 80


# --- the end of a script


MANNERS = """
import atexit, dataclasses, multiprocessing, pickle, sys, os
@dataclasses.dataclass
class Job:
    number: int
def double(job):
    return job.number * 2
if __name__ == "__main__":
    atexit.register(print, "at exit")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Job(2)]), sys.argv, __file__, __spec__, sys.path[0])
    sys.stdout.buffer.write(b"\\xff raw\\n")
    print("to stderr", file=sys.stderr)
    os.write(1, b"below\\n")
    sys.exit(END)
"""


@pytest.mark.parametrize(("end", "code"), [("'words'", 1), ("None", 3)])
def test_an_ordinary_script_is_undisturbed(tmp_path: Path, end: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(MANNERS.replace("END", end))
    call = [str(script), "--report", "mine.html", "-q", "--", "-x"]
    plain = subprocess.run([sys.executable, *call], env=environment(), capture_output=True, timeout=60)
    ours = subprocess.run([sys.executable, "-c", RUN, "run", *call], env=environment(), capture_output=True, timeout=60)
    assert plain.returncode == (code if code != 3 else 0)
    assert ours.returncode == code
    assert ours.stdout == plain.stdout
    assert plain.stderr in ours.stderr
    assert b"no module with parameters was called" in b" ".join(ours.stderr.split())


INTERRUPTED = """
import atexit, signal
from tiny import *
atexit.register(print, "at exit", flush=True)
model = Net()
model(ids())
print("ready", flush=True)
def wait():
    signal.raise_signal(signal.SIGINT)
wait()
"""
TINY = Path(__file__).parents[2] / "running" / "scripts" / "tiny.py"


def test_an_interrupt_ends_it_as_it_ends_python(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY.read_text())
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(INTERRUPTED)
    ends = []
    for call in ([str(script)], ["-c", RUN, "run", "--report", str(page), str(script)]):
        done = python(*call)
        ends.append((done.returncode, done.stdout, done.stderr))
    (code, out, err), (our_code, our_out, our_err) = ends
    assert code == our_code == -signal.SIGINT
    assert out == our_out == "ready\nat exit\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err in our_err
    assert "script.py ended with KeyboardInterrupt" in our_err
    assert "Net" in page.read_text()


def test_an_exception_in_the_first_call_and_after_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY.read_text())
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text("from tiny import *\nmodel = Plain()\nmodel(torch.randn(2, 3))\n")
    plain, ours = python(str(script)), attnres("run", str(script))
    assert (plain.returncode, ours.returncode) == (1, 1)
    assert "shapes cannot be multiplied" in plain.stderr
    assert plain.stderr in ours.stderr
    script.write_text("from tiny import *\nmodel = Net()\nmodel(ids())\nraise ValueError('mine')\n")
    plain, ours = python(str(script)), attnres("run", "--report", str(page), str(script))
    assert ours.returncode == 1
    assert plain.stderr in ours.stderr
    assert "script.py ended with ValueError" in ours.stderr
    assert page.exists()


# --- what we say


def test_json_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY.read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os\nfrom tiny import *\natexit.register(print, 'late noise')\nprint('noise')\n"
        "os.system('echo shell noise')\nPlain()(torch.randn(2, 20))\nmodel = Net()\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.1))\nraise SystemExit(9)"
    )
    done = attnres("run", "--json", str(script))
    assert done.returncode == 9
    document = json.loads(done.stdout)
    assert document["exit_code"] == 9
    assert document["exception"] is None
    assert [each["module"] for each in document["refused"]] == ["Plain"]
    converted = document["converted"]
    assert (converted["model"], converted["mode"], converted["when"]) == ("Net", "train", "first call")
    assert converted["optimizers"] == [
        {"optimizer": "SGD", "how": "added", "group": 0, "groups": 1, "lr": 0.1, "weight_decay": 0.0}
    ]
    assert converted["report"]["parameters_added"] == 32
    assert len(converted["query_norms"]) == 4
    for noise in ("late noise", "noise\n", "shell noise"):
        assert noise in done.stderr


def test_nothing_to_convert_says_why(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY.read_text())
    script = tmp_path / "script.py"
    script.write_text("from tiny import *\nPlain()(torch.randn(2, 20))\nNet(depth=1)(ids())\nprint('done')")
    done = attnres("run", "--report", str(tmp_path / "page.html"), str(script))
    assert done.returncode == 3
    assert done.stdout == "done\n"
    said = " ".join(done.stderr.split())
    assert "no model was converted; these were called: Plain: no residual stream was found: the traced" in said
    assert "Net: no residual stream could be converted" in said
    assert "too_few_sublayers" in said or "too_short" in said
    assert not (tmp_path / "page.html").exists()
    quiet = attnres("run", "-q", str(script), RANK="0")
    assert quiet.returncode == 3
    assert quiet.stderr == f"error: {script}: no model was converted\n"
    other = attnres("run", str(script), RANK="1")
    assert (other.returncode, other.stdout, other.stderr) == (3, "done\n", "")
