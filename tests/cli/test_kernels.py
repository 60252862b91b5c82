"""``attnres kernels``: what is printed and written, for a site and for a model, compiled for all four architectures."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnres_compile.cli.kernels import matrix, tables
from attnres_compile.cli.kernels.matrix import full_matrix, sampled_matrix
from attnres_compile.cli.main import app
from attnres_compile.kernels.inspection.kernel import ARCHITECTURES
from attnres_compile.kernels.inspection.site import inspect_site, label, site_texts
from attnres_compile.kernels.spec import KernelSpec
from tests.cli.processes import attnres

SITE = ("--sources", "3", "--dim", "1024")


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNRES_CACHE_DIR", str(tmp_path / "kernel_cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, ["kernels", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def rows(*arguments: str) -> list[dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    return json.loads(out)


def process(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return attnres("kernels", *arguments, code=before, fresh=bool(before), **environment)


# --- the source


def test_the_source_is_the_generated_text_and_runs_as_python() -> None:
    code, out, err = run(*SITE)
    assert (code, err) == (0, "")
    ((_, _, text),) = site_texts(KernelSpec("mix", 3, 1024))
    assert out == text + "\n"
    ast.parse(out)
    assert "def attnres_mix_forward(query0, source0, source1, source2, out, tokens):" in out


def test_the_source_is_plain_in_a_pipe_and_coloured_on_a_terminal() -> None:
    plain = process(*SITE)
    assert plain.returncode == 0
    assert "\x1b" not in plain.stdout
    coloured = process(*SITE, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in coloured.stdout
    assert "\x1b" not in process(*SITE, FORCE_COLOR="1", NO_COLOR="1").stdout


@pytest.mark.parametrize(
    ("arguments", "contains"),
    [
        (("--backward",), "def attnres_mix_backward("),
        (("--fuse", "add, layernorm"), "branch, partial, norm_weight, norm_bias, out, tokens"),
        (("--kind", "inter", "--queries", "2"), "def attnres_inter_forward(query0, query1, "),
        (("--kind", "merge"), "def attnres_merge_forward(query0, source0, mixed, lse, out, tokens)"),
        (("--gain", "sum"), "3.0 / total0"),
        (("--eps", "0.25"), "0.25"),
        (("--logit-scale", "0.125"), "0.125"),
        (("--strided",), "source0_stride"),
        (("--backward", "--accumulate"), "accumulated2"),
    ],
)
def test_options_reach_the_text(arguments: tuple[str, ...], contains: str) -> None:
    code, out, _ = run(*SITE, *arguments)
    assert code == 0
    assert contains in out


def test_train_gives_both_directions() -> None:
    out = run(*SITE, "--train", "--fuse", "add,rmsnorm")[1]
    assert "def attnres_mix_forward(" in out
    assert "def attnres_mix_backward(" in out
    assert "total" in out.split("def attnres_mix_backward(")[0]  # what the backward needs is kept


# --- the table


def test_json_for_all_architectures() -> None:
    found = rows(*SITE, "--fuse", "add,rmsnorm", "--arch", "all", "--arch", "sm_90")
    assert [row["arch"] for row in found] == list(ARCHITECTURES)
    for row in found:
        assert row["kernel"] == "mix_forward_n3_d1024_bf16_add_rmsnorm"
        # 3 sources and a branch in; the partial sum and the normed mix out: 6 rows of 1024 bfloat16.
        assert row["floor_bytes_per_token"] == 6 * 2048
        assert row["load_bytes_per_token"] == 4 * 2048
        assert row["store_bytes_per_token"] == 2 * 2048
        assert row["statistics_bytes_per_token"] == row["reread_bytes_per_token"] == row["spills"] == 0
        assert row["vector_bytes"] == 16
        assert 16 <= row["registers"] <= 255
        assert row["shared_memory"] >= 0
        assert (row["kind"], row["direction"], row["sources"], row["dim"]) == ("mix", "forward", 3, 1024)
        assert row["dtype"] == "bfloat16"
        assert row["launches"] == len(row["kernels"]) == 1
        assert tables.balanced(row)


def test_json_without_an_architecture_holds_the_texts() -> None:
    (row,) = rows(*SITE)
    assert row["kernel"] == "mix_forward_n3_d1024_bf16"
    (text,) = row["sources"]
    ast.parse(text)


def test_the_table() -> None:
    code, out, err = run(*SITE, "--arch", "sm_90", "--arch", "gfx942", "--table")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mix forward, 3 sources of 1024 features in bf16"
    assert lines[1].split() == [
        "arch",
        "regs",
        "spills",
        "shared",
        "vec",
        "loaded",
        "stored",
        "floor",
        "stats",
        "again",
    ]
    for line, arch in zip(lines[2:4], ("sm_90", "gfx942"), strict=True):
        cells = line.split()
        assert cells[0] == arch
        assert cells[2] == "0"
        assert cells[4:] == ["16", "6,144", "2,048", "8,192", "0", "0"]
    assert max(map(len, lines)) <= 80


def test_source_then_table() -> None:
    out = run(*SITE, "--arch", "sm_90")[1]
    assert out.index("def attnres_mix_forward(") < out.index("sm_90")


def test_out_writes_everything(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kernels"
    code, out, _ = run(*SITE, "--arch", "sm_90", "--arch", "gfx942", "--json", "--out", str(folder))
    assert code == 0
    name = "mix_forward_n3_d1024_bf16"
    assert {f"{name}.py", f"{name}-sm_90.ptx", f"{name}-gfx942.amdgcn", "table.json", "table.md"} <= {
        entry.name for entry in folder.iterdir()
    }
    assert json.loads((folder / "table.json").read_text()) == json.loads(out)
    assert ".entry attnres_mix_forward" in (folder / f"{name}-sm_90.ptx").read_text()
    assert "gfx942" in (folder / f"{name}-gfx942.amdgcn").read_text()
    assert "| 3 | 1 | 1024 | bf16 |  | 1 | 6,144 | 2,048 | 8,192 | 0 | 0 | 0 |" in (folder / "table.md").read_text()


def test_a_site_of_several_launches_is_one_row() -> None:
    # A backward of so many wide sources is taken in groups: each reads grad and the mix or delta again.
    (row,) = rows("--sources", "33", "--dim", "8192", "--backward", "--arch", "sm_90")
    assert row["launches"] > 1
    assert row["floor_bytes_per_token"] == (2 * 33 + 2) * 16384
    groups_read = (row["launches"] - 1) * 16384
    assert row["reread_bytes_per_token"] == groups_read
    counted = row["load_bytes_per_token"] + row["store_bytes_per_token"] - row["statistics_bytes_per_token"]
    assert counted == row["floor_bytes_per_token"] + groups_read
    assert tables.balanced(row)


def test_a_row_that_is_off_is_seen() -> None:
    (row,) = rows(*SITE, "--arch", "sm_90")
    assert tables.balanced(row)
    assert not tables.balanced({**row, "load_bytes_per_token": row["load_bytes_per_token"] * 1.03})
    assert not tables.balanced({**row, "store_bytes_per_token": 0})
    narrow = {**row, "vector_bytes": 8, "spills": 4}
    assert tables.summary([row, narrow]).startswith("2 compiled: 1 spill, 1 access rows by less than 16 bytes, 0")


# --- a model's kernels


def test_a_model(script: str) -> None:
    # 6 sublayers in 3 blocks of 2: sites see root, and what is finished, and the sum that runs.
    found = rows(script, "--block-size", "2")
    assert [row["kernel"] for row in found] == [f"mix_forward_n{n}_d8_fp32" for n in (2, 3, 4)]
    both = rows(script, "--block-size", "2", "--train", "--dtype", "bf16")
    assert len(both) == 6
    assert both[0]["kernel"] == "mix_forward_n2_d8_bf16_keep"
    assert both[1]["kernel"] == "mix_backward_n2_d8_bf16"


def test_a_model_in_two_phases(script: str) -> None:
    found = rows(script, "--block-size", "2", "--kind", "inter")
    # Two sites look at root and block 1, two at root and blocks 1 and 2; the first has the root alone.
    assert "inter_forward_n2_s2_d8_fp32" in [row["kernel"] for row in found]
    assert [row["kernel"] for row in rows(script, "--block-size", "2", "--kind", "merge")] == ["merge_forward_d8_fp32"]


def test_a_model_compiled(script: str) -> None:
    code, out, err = run(script, "--arch", "sm_90", "--table")
    assert code == 0
    assert "noise of the script" in err
    assert "noise" not in out
    assert "mix forward, 2 sources of 8 features in fp32" in out


# --- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say --sources and --dim, or TARGET"),
        (("--sources", "3"), "say --dim"),
        (("--dim", "64"), "say --sources"),
        ((*SITE, "--arch", "sm_91"), "unknown architecture 'sm_91'. Known are sm_80, sm_90, sm_100, gfx942"),
        ((*SITE, "--dtype", "fp8"), "--dtype 'fp8' is none of bf16, fp16, fp32"),
        ((*SITE, "--kind", "norm"), "--kind 'norm' is none of mix, inter, merge"),
        ((*SITE, "--fuse", "gelu"), "--fuse 'gelu' is none of add, rmsnorm, layernorm"),
        ((*SITE, "--fuse", "rmsnorm,layernorm"), "contradict each other"),
        ((*SITE, "--fuse", "add", "--backward"), "the backward of a fused add"),
        ((*SITE, "--fuse", "add", "--kind", "inter"), "no neighbours to fuse"),
        ((*SITE, "--queries", "4"), "--queries is for --kind inter"),
        ((*SITE, "--accumulate"), "--accumulate is for gradients"),
        ((*SITE, "--gain", "max"), "--gain 'max' is none of mean, sum"),
        ((*SITE, "--value", "cooked"), "--value 'cooked' is none of raw, normalized"),
        ((*SITE, "--eps", "nan"), "finite"),
        ((*SITE, "--json", "--markdown"), "--json and --markdown contradict each other"),
        ((*SITE, "--table"), "a table needs --arch"),
        ((*SITE, "--num-blocks", "2"), "--num-blocks needs TARGET"),
        (("--sources", "0", "--dim", "64"), "--sources must be at least 1, not 0"),
        (("--sources", "2", "--dim", "-1"), "--dim must be at least 1, not -1"),
        (("script.py", "--sources", "2"), "TARGET and --sources contradict each other"),
        (("missing.py",), "missing.py does not exist"),
        (("--matrix", "most"), "--matrix 'most' is none of sampled, full"),
        (("--matrix", "full", "--dim", "64"), "--matrix and --dim contradict each other"),
        (("--matrix", "sampled", "--jobs", "0"), "--jobs must be at least 1, not 0"),
    ],
)
def test_errors_are_one_message(script: str, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == "" or json.loads(out)["error"]["message"] == err.removeprefix("error: ").strip()
    assert message in err
    assert "Traceback" not in err


def test_a_model_without_a_stream(script: str) -> None:
    code, out, err = run("script.py:NoStream")
    assert code == 3
    assert "Left alone: 1 add" in out or "no residual stream can be converted" in out
    assert "no residual stream" in err


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(*SITE, "--out", str(tmp_path / "file"))
    assert code == 2
    assert "cannot be written" in err


def test_without_triton_the_source_is_printed_and_compiling_says_what_is_missing() -> None:
    missing = "import sys; sys.modules['triton'] = None"
    done = process(*SITE, before=missing)
    assert done.returncode == 0
    assert "def attnres_mix_forward(" in done.stdout
    done = process(*SITE, "--arch", "sm_90", before=missing)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "pip install triton" in done.stderr


def test_without_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.NvidiaTool, "from_path", lambda path: None)
    code, out, err = run(*SITE, "--arch", "sm_90")
    assert (code, out) == (2, "")
    assert "Cannot find ptxas" in err


def test_help_has_an_example_that_works_as_printed() -> None:
    code, out, _ = run("--help", COLUMNS="200")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "Example: attnres kernels" in line]
    example = line.split("Example: attnres kernels")[1].split()
    code, out, _ = run(*example)
    assert code == 0
    assert "mix forward, 9 sources of 2048 features in bf16, with rmsnorm" in out
    assert "def attnres_mix_forward(" in out


# --- the matrix


def test_the_matrix_covers_what_it_says() -> None:
    every = full_matrix()
    assert len(every) == len(set(every)) == len({label(spec) for spec in every})
    for kind in ("mix", "inter"):
        for backward in (False, True):
            found = {(s.sources, s.dim, s.dtype) for s in every if s.kind == kind and s.backward == backward}
            assert found == {
                (n, d, dtype)
                for n in (2, 5, 9, 17, 33)
                for d in (768, 1024, 2048, 4096, 7168, 8192)
                for dtype in ("bfloat16", "float32")
            }
    fusions = {(s.branch_dtype is not None, s.norm) for s in every if s.kind == "mix" and not s.backward}
    assert fusions == {(add, norm) for add in (False, True) for norm in ("", "rmsnorm", "layernorm")}
    sample = sampled_matrix()
    assert sample == sampled_matrix()
    assert set(sample) < set(every)
    assert 24 <= len(sample) <= 60
    assert {(s.kind, s.backward) for s in sample} == {(s.kind, s.backward) for s in every}
    assert KernelSpec("mix", 33, 8192, keep=True) in sample


def test_the_matrix_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = [KernelSpec("mix", n, 768) for n in (2, 3)]
    monkeypatch.setattr(matrix, "sampled_matrix", lambda: specs)
    arguments = ("--matrix", "sampled", "--arch", "sm_90", "--out", str(tmp_path), "--jobs", "1")
    first = rows(*arguments)
    assert [row["kernel"] for row in first] == ["mix_forward_n2_d768_bf16", "mix_forward_n3_d768_bf16"]
    assert first == json.loads((tmp_path / "table.json").read_text())
    lines = (tmp_path / "matrix.jsonl").read_text().splitlines()
    assert len(lines) == 2
    # The first is done, the second was being written.
    (tmp_path / "matrix.jsonl").write_text(lines[0] + "\n" + lines[1][:40])
    made: list[KernelSpec] = []

    def compile_all(todo, found, jobs, journal):
        made.extend(spec for spec, _ in todo.values())
        for key, (spec, arch) in todo.items():
            found[key] = inspect_site(spec, arch).to_dict()
        return []

    monkeypatch.setattr(matrix, "_compile_all", compile_all)
    again = rows(*arguments)
    assert made in ([specs[0]], [specs[1]])
    assert [row["kernel"] for row in again] == [row["kernel"] for row in first]
    document = run(*arguments[:4], "--markdown")[1]
    assert document.startswith("# What the generated kernels compile to")
    assert "attnres kernels --matrix sampled --markdown" in document
    assert "## mix, forward" in document


def test_kernels_of_a_matrix_that_do_not_compile_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [KernelSpec("mix", 2, 768)]
    monkeypatch.setattr(matrix, "sampled_matrix", lambda: specs)
    monkeypatch.setattr(matrix, "_compile_all", lambda *_: ["mix_forward for sm_90: no reason"])
    code, _, err = run("--matrix", "sampled", "--arch", "sm_90")
    assert code == 2
    assert "kernels that do not compile: 1; the first: mix_forward for sm_90: no reason" in err
