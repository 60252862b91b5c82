"""The survey says what happens to a model: each status by a model or a converter that earns it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.zoo import made_entries as made
from tests.zoo.survey import rows
from tests.zoo.survey.__main__ import app
from tests.zoo.survey.measure import Convert, measure
from tests.zoo.survey.row import STATUSES, Row
from tests.zoo.survey.source import digest
from tests.zoo.survey.worker import GIB, Limits, Source, survey


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """The survey tells libraries to stay offline, which is not for the tests that follow."""
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


# --- measure, in this process


@pytest.mark.parametrize(
    ("name", "expected"), [("stack", (6,)), ("two-streams", (6, 4)), ("uncopied", (6,))], ids=lambda value: str(value)
)
def test_what_is_whole_and_exact_is_converted(name: str, expected: tuple[int, ...]) -> None:
    row = measure(made.entry(name))
    assert (row.status, row.expected, row.found, row.reason) == ("converted", expected, expected, "")
    assert row.output_error is not None and row.output_error < 1e-5
    assert row.gradient_error is not None and row.gradient_error < 1e-5
    assert row.graph_breaks == 0
    assert row.parameters > 0 and row.seconds > 0 and row.class_name and row.source == digest()


@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("stack", made.a_mean),
        ("stack", made.slightly_off),
        ("touchy", made.slightly_off),
        ("touchier", made.slightly_off),
        ("touchy-single", made.slightly_off),
    ],
)
def test_a_wrong_converter_is_found_out(name: str, convert: Convert) -> None:
    row = measure(made.entry(name), convert=convert)
    assert (row.status, row.reason) == ("wrong", "not_exact")
    # What computes in float32 whatever its dtype cannot be told apart any finer.
    assert "float32" in row.detail and ("float64" in row.detail or name.endswith("-single"))


@pytest.mark.parametrize(
    ("name", "decided"), [("touchy", "float64"), ("touchier", "float64"), ("touchy-single", "off by")]
)
def test_an_ill_conditioned_model_is_not_called_wrong(name: str, decided: str) -> None:
    row = measure(made.entry(name))
    assert row.status == "converted"
    assert row.output_error is not None and row.output_error > 1e-5, "float32 would have done"
    assert decided in row.detail and "times that is rounding" in row.detail


def test_a_part_is_told_from_the_whole() -> None:
    row = measure(made.entry("two-streams"), convert=made.only_long_streams)
    assert (row.status, row.expected, row.found, row.reason) == ("partly", (6, 4), (6,), "too_few_sublayers")


def test_more_than_was_counted_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.survey.measure._counted", lambda *_: (5,))
    row = measure(made.entry("stack"))
    assert (row.status, row.reason, row.detail) == ("differs", "more_than_counted", "counted 5, found 6")


def test_a_stream_in_pieces_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.survey.measure._counted", lambda *_: (10,))
    row = measure(made.entry("two-streams"))
    assert (row.status, row.reason) == ("partly", "split")


def test_refusals_have_their_reason() -> None:
    row = measure(made.entry("post-norm"))
    assert (row.status, row.found, row.reason) == ("refused", (), "post_norm")
    assert "tests/zoo/made_entries.py:" in row.detail and not row.detail.startswith("/")
    assert row.reasons["post_norm"] == 4


def test_a_model_without_residuals_has_no_stream() -> None:
    assert measure(made.entry("chain")).status == "no_stream"


def test_graph_breaks_are_counted_and_placed() -> None:
    row = measure(made.entry("broken"))
    assert (row.status, row.reason, row.graph_breaks) == ("refused", "graph_break", 1)
    assert row.break_at.startswith("tests/zoo/made_entries.py:")


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("refuse", "not_built", "needs a compiler for a language of 1964"),
        ("refusing", "not_run", "ValueError: this model takes no such input"),
        ("infinite", "not_finite", "not finite"),
    ],
)
def test_what_eager_pytorch_cannot_run_is_not_run(name: str, reason: str, words: str) -> None:
    row = measure(made.entry(name))
    assert (row.status, row.reason) == ("not_run", reason)
    assert words in row.detail


def test_a_failure_of_the_package_is_an_error() -> None:
    row = measure(made.entry("stack"), convert=made.a_failure)
    assert (row.status, row.reason) == ("error", "ZeroDivisionError")
    assert "a bug in the package (tests/zoo/made_entries.py:" in row.detail


# --- each in a process of its own

SOURCE = Source("tests.zoo.made_entries:by_full_name", "tests.zoo.survey.measure:measure", ("tests.zoo.made_entries",))


def surveyed(*names: str, jobs: int = 1, source: Source = SOURCE, **limits: float) -> dict[str, Row]:
    wanted = [made.entry(name) for name in names]
    done = survey(wanted, jobs, Limits(**{"seconds": 60.0, "memory": 6.0 * GIB, **limits}), source)
    return {row.name.removeprefix("torch/made/"): row for row in done}


def test_hanging_costs_its_own_row_and_little_time() -> None:
    begin = time.perf_counter()
    found = surveyed("hang", "chain", jobs=2, seconds=8.0)
    assert time.perf_counter() - begin < 40
    assert found["hang"].status == "timeout"
    assert found["hang"].detail == "over 8 s, during: build"
    assert found["chain"].status == "no_stream"


def test_hogs_are_ended() -> None:
    row = surveyed("hog", memory=1.5 * GIB)["hog"]
    assert (row.status, row.detail) == ("memory", "over 1.5 GiB, during: build")
    assert row.name == "torch/made/hog" and row.library == "torch" and row.versions


def test_crashes_are_errors() -> None:
    found = surveyed("crash", "leave", jobs=2)
    assert found["crash"].status == found["leave"].status == "error"
    assert "SIGSEGV during: build" in found["crash"].detail
    assert found["crash"].detail.endswith("the last words") or "Segmentation" in found["crash"].detail
    assert "status 3" in found["leave"].detail


def test_a_wrong_converter_is_found_out_in_its_own_process_too() -> None:
    source = Source(SOURCE.entries, "tests.zoo.made_entries:measure_wrongly", SOURCE.preload)
    assert surveyed("stack", source=source)["stack"].status == "wrong"
    assert surveyed("stack")["stack"].status == "converted"


# --- the file


def test_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, second = (measure(made.entry(name)) for name in ("refuse", "refusing"))
    rows.append(second, path)
    rows.append(first, path)
    assert rows.read(path) == {first.name: first, second.name: second}
    assert rows.read(tmp_path / "none") == {}
    assert all(row.status in STATUSES for row in rows.read(path).values())


def test_an_interrupted_line_is_not_read_and_not_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = measure(made.entry("refuse"))
    path.write_text(rows.text(row) + rows.text(row)[:40])
    assert list(rows.read(path)) == [row.name]
    rows.append(row, path)
    rows.append(row, path)
    assert list(rows.read(path)) == [row.name], "a cut line in the middle"


def test_tidying_sorts_and_drops_what_is_no_more(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for name in ("refusing", "refuse", "infinite", "refuse"):
        rows.append(measure(made.entry(name)), path)
    rows.tidy(path, {"torch/made/refusing", "torch/made/refuse"}, {"torch"})
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert names == ["torch/made/refuse", "torch/made/refusing"]
    rows.tidy(path, (), {"timm"})
    assert len(path.read_text().splitlines()) == 2, "rows of other libraries stay"


# --- the command


def command(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = ("--library", "torch", "--only", "*/decoder-p*-norm-batch-first-gelu", "--rows", str(path))
    done = command(*options, "--seconds", "100")
    assert done.exit_code == 0, done.output
    found = rows.read(path)
    assert {name.split("/")[-1]: row.status for name, row in found.items()} == {
        "decoder-post-norm-batch-first-gelu": "refused",
        "decoder-pre-norm-batch-first-gelu": "converted",
    }
    again = command(*options)
    assert "2 architectures, 2 of them up to date" in again.stdout
    assert rows.read(path) == found

    old = [Row.from_dict({**row.to_dict(), "source": "another", "status": "wrong"}) for row in found.values()]
    rows.write(old, path)
    kept = command(*options, "--missing")
    assert kept.exit_code == 1 and "wrong" in kept.stdout
    assert rows.read(path) == {row.name: row for row in old}
