"""``attnres diff``: sites before and after, on a narrow screen, a wide one and as JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from attnres_compile.cli.main import app
from attnres_compile.differences import Line, SiteDiff
from attnres_compile.views import diff as view


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_printed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"Example: attnres (.*?) *$", run("diff", "--help")[1], re.MULTILINE)
    code, out, err = run(*example.split())
    assert code == 0, err
    assert "attnres_compile.demo:model: 9 sites, 3 shown" in out
    assert "Site blocks.2.norm2: mixes root, block 1, partial 2; added at" in out
    assert "  + mix_blocks_2_norm2 = mix(attnres.blocks_2_norm2; root=x, block_1," in out
    assert list(tmp_path.iterdir()) == []


def test_lines_at_80_columns(script: str) -> None:
    code, out, _ = run("diff", script, "--num-blocks", "2")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\x1b" not in out
    assert "script.py:model: 7 sites, 3 shown" in out
    assert "  - x = embedding + linear  # script.py:12" in out or "  - x_1 = x + linear  # script.py:12" in out
    assert out.splitlines()[-1] == "and 4 more sites (--all shows them, --site NAME one of them)"
    everything = run("diff", script, "--num-blocks", "2", "--all")[1]
    assert everything.count("Site ") == 7
    assert "only the root, so nothing changes" in everything
    assert "more sites" not in everything
    assert run("diff", script, "-q")[1] == "script.py:model: 7 sites, 3 shown\n"


def test_json_has_every_site_of_the_report(script: str) -> None:
    code, out, _ = run("diff", script, "--num-blocks", "2", "--json")
    found = json.loads(out)
    report = json.loads(run("inspect", script, "--num-blocks", "2", "--json")[1])
    (stream,) = report["streams"]
    assert code == 0
    assert [each["site"] for each in found["sites"]] == [site["name"] for site in stream["sites"]]
    for each, site in zip(found["sites"], stream["sites"], strict=True):
        assert each["readers"] == site["readers"]
        assert each["sources"] == site["sources"]
        before = [line["name"] for line in each["before"]]
        after = [line["name"] for line in each["after"]]
        if site["query"]:
            sublayer = stream["sublayers"][site["index"] - 1]
            assert before[: len(sublayer["adds"])] == sublayer["adds"]
            assert not set(sublayer["adds"]) & set(after)
            assert each["where"] == sublayer["where"]
            mix = f"mix_{re.sub(r'[^0-9a-z]', '_', site['name'])} = mix("
            assert any(line["code"].startswith(mix) for line in each["after"])


def test_a_site_that_is_not_there(script: str) -> None:
    code, out, err = run("diff", script, "--site", "blocks.1.mixre")
    assert (code, out) == (2, "")
    assert "there is no site 'blocks.1.mixre'. Did you mean blocks.1." in err
    code, out, _ = run("diff", script, "--site", "no.such", "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "TargetError"


def test_a_model_that_cannot_be_converted(script: str) -> None:
    code, out, err = run("diff", f"{script}:NoStream")
    assert code == 3
    assert "no residual stream can be converted" in out
    assert "error: no residual stream was found: the traced graph adds no two tensors" in err


def test_a_model_without_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is enough to know the shapes: 32 layers of 4096 features are there at once."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run("diff", "hf:llama", "--site", "model.layers.20.input_layernorm")
    assert code == 0, err
    assert "Site model.layers.20.input_layernorm: mixes root, block 1, block 2" in out
    assert "modeling_llama.py:" in out


# ------------------------------------------------------------------ the view

ADD = Line("x_1", "x_1 = x + [bold]f[/bold]", "model.py:3")
READ = Line("n", "n = norm(x_1)", "model.py:4")
MIX = Line("mix_n", "mix_n = mix(q; root=x, block_1=f)", "model.py:4")
READ_NOW = Line("n", "n = norm(mix_n)", "model.py:4")
SITE = SiteDiff("n", "stream0", ("n",), ("root", "block 1"), "model.py:3", (ADD, READ), (MIX, READ_NOW))


def shown(width: int, terminal: bool, **options: bool) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, **options)  # type: ignore[arg-type]
    console.print(view.diff([SITE], 1, "toy"))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_two_columns_on_a_wide_terminal() -> None:
    lines = shown(120, True)
    assert lines[2] == "Site n: mixes root, block 1; added at model.py:3"
    assert lines[3].split() == ["original", "rewritten"]
    assert lines[4].startswith("  - x_1 = x + [bold]f[/bold]  # model.py:3")
    assert lines[4].endswith("+ mix_n = mix(q; root=x, block_1=f)")
    assert lines[5].startswith("  - n = norm(x_1)  # model.py:4")
    assert lines[5].endswith("+ n = norm(mix_n)")
    # One column of code begins where the one above it does.
    assert lines[4].index("+ mix_n") == lines[5].index("+ n =")


@pytest.mark.parametrize(("width", "terminal"), [(99, True), (120, False)])
def test_lines_elsewhere(width: int, terminal: bool) -> None:
    assert shown(width, terminal)[3:] == [
        "  - x_1 = x + [bold]f[/bold]  # model.py:3",
        "  + mix_n = mix(q; root=x, block_1=f)",
        "  - n = norm(x_1)  # model.py:4",
        "  + n = norm(mix_n)",
    ]


def test_what_is_the_same_has_no_mark() -> None:
    same = SiteDiff("r", "stream0", ("r",), ("root",), "", (READ,), (READ,))
    file = io.StringIO()
    Console(file=file, width=80).print(view.diff([same], 1, "toy"))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[2:] == ["Site r: only the root, so nothing changes", "    n = norm(x_1)  # model.py:4"]


def test_few_sites_of_many() -> None:
    def site(stream: str, number: int) -> SiteDiff:
        sources = ("root",) if number == 0 else ("root", "block 1")
        return SiteDiff(f"{stream}.{number}", stream, (), sources, "", (), ())

    found = [site("a", n) for n in range(10)] + [site("b", n) for n in range(2)]
    assert [each.site for each in view.few(found)] == ["a.1", "a.5", "a.9", "b.0", "b.1"]
