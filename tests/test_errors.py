"""Errors: one message each, with what, where and the remedy, that survives a pickle."""

from __future__ import annotations

import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import attnres_compile as ac
from attnres_compile import errors
from attnres_compile.errors import AttnResError, InexactError, NoStreamError
from attnres_compile.exactness import Exactness
from attnres_compile.report import LeftAlone, TransformReport

KINDS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, AttnResError) and kind.__module__ == errors.__name__
]
REPORT = TransformReport(rejections=(LeftAlone("post_norm", "a post-norm", "layers.0", "model.py:3", "add"),))
EXACT = Exactness(False, 0.5, None, 1e-5, "float32", 3, 0, "eval", randomised=False)


def make(kind: type[AttnResError], **place: str) -> AttnResError:
    if issubclass(kind, NoStreamError):
        return kind("what", report=REPORT, **place)
    return kind("what", exactness=EXACT, **place) if issubclass(kind, InexactError) else kind("what", **place)


def test_hierarchy() -> None:
    assert len(KINDS) == 20
    assert issubclass(errors.RejectedStreamError, errors.NoStreamError)
    for kind, builtin in (
        (errors.ConfigError, ValueError),
        (errors.InputsError, TypeError),
        (errors.PlainExecutionError, RuntimeError),
    ):
        assert issubclass(kind, builtin)


def test_every_error_is_public_and_documented() -> None:
    # TargetError belongs to the command line.
    public = {name for name in ac.__all__ if name.endswith("Error")}
    assert public == {kind.__name__ for kind in KINDS} - {"TargetError"}
    assert all(kind.__doc__ for kind in KINDS)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({}, "what"),
        ({"remedy": "Do this"}, "what. Do this"),
        ({"module": "layers.1"}, "what (module layers.1)"),
        ({"where": "model.py:7"}, "what (model.py:7)"),
        (
            {"module": "layers.1", "where": "model.py:7", "remedy": "Do this"},
            "what (module layers.1, model.py:7). Do this",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_message(kind: type[AttnResError], place: dict[str, str], message: str) -> None:
    error = make(kind, **place)
    assert str(error) == message
    assert error.args == (message,)
    assert (error.what, error.module, error.where, error.remedy) == (
        "what",
        *(place.get(name, "") for name in ("module", "where", "remedy")),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pickle(kind: type[AttnResError]) -> None:
    error = make(kind, module="layers.1", where="model.py:7", remedy="Do this")
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    if isinstance(again, NoStreamError):
        assert again.report == REPORT
    if isinstance(again, InexactError):
        assert again.exactness == EXACT


def _raise() -> None:
    raise make(errors.RejectedStreamError, remedy="Do this")


def test_an_error_of_another_process_arrives_whole() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(_raise).exception()
    assert isinstance(error, errors.RejectedStreamError)
    assert error.report == REPORT
    assert error.remedy == "Do this"
