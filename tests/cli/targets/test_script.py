"""Scripts and modules -> model and inputs; and every way in which that can go wrong."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from attnres_compile.cli.targets import load_target
from attnres_compile.errors import AttnResError, InputsError, TargetError

Write = Callable[..., str]

HEAD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return x + self.linear(x)
class Wide(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a script and gives its path; the process is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(body: str, name: str = "script.py", head: str = HEAD) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + body)
        return str(path.relative_to(tmp_path))

    yield make
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def fails(kind: type[AttnResError], target: str, *specs: str) -> str:
    with pytest.raises(kind) as caught:
        load_target(target, specs)
    return str(caught.value)


# --- found


@pytest.mark.parametrize(
    ("body", "name", "width"),
    [
        ("thing = Net(5)", "thing", 5),
        ("", "Net", 4),
        ("def make(): return Net(6)", "make", 6),
        ("def make(width=7): return Net(width)", "make", 7),
        ("make = lambda: Net(8)", "make", 8),
        ("import functools; make = functools.partial(Net, 9)", "make", 9),
        ("class Space: inner = Net(10)", "Space.inner", 10),
    ],
)
def test_named(write: Write, body: str, name: str, width: int) -> None:
    script = write(body)
    found = load_target(f"{script}:{name}", [f"f32[2,{width}]"])
    assert isinstance(found.model, nn.Module)
    assert found.model.linear.in_features == width
    assert found.name == f"script.py:{name}"
    assert found.model(*found.inputs.args).shape == (2, width)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("model = Net(5)", "model"),
        ("other = Net(3)\nmodel = Net(5)", "model"),
        ("model = 'gpt2'\ndef build_model(): return Net(5)", "build_model"),
        ("def model(config): return None\ndef build(): return Net(5)", "build"),
        ("mine = Net(5)", "mine"),
        ("mine = also_mine = Net(5)", "mine"),
    ],
)
def test_default_name(write: Write, body: str, name: str) -> None:
    found = load_target(write(body), ["f32[1,5]"])
    assert found.name == f"script.py:{name}"
    assert found.model.linear.in_features == 5


def test_the_only_class(write: Write) -> None:
    script = write(
        "from torch import nn\nclass Only(nn.Linear):\n    def __init__(self): super().__init__(2, 2)", head=""
    )
    assert load_target(script, ["f32[2]"]).name == "script.py:Only"


def test_module_targets(write: Write) -> None:
    write("", "package_of_test/__init__.py", head="")
    write("model = Net(5)\nexample_inputs = torch.ones(1, 5)", "package_of_test/inner.py")
    assert load_target("package_of_test.inner:Net").model.linear.in_features == 4
    assert load_target("package_of_test.inner").name == "package_of_test.inner:model"


def test_the_script_is_a_real_module_but_not_main(write: Write) -> None:
    body = """
from dataclasses import dataclass
import sys
from helper_of_script import WIDTH
@dataclass
class Config:
    width: int = WIDTH
    further: "Config | None" = None
config = Config()
model = Net(config.width)
model.arguments = sys.argv
if __name__ == "__main__":
    raise SystemExit("ran as main")
"""
    write("WIDTH = 11", "folder/helper_of_script.py", head="")
    found = load_target(write(body, "folder/my_own_script.py"), ["f32[1,11]"])
    assert found.model.linear.in_features == 11
    assert found.model.arguments == [str(Path("folder/my_own_script.py").resolve())]
    config = sys.modules["my_own_script"].config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_script_named_like_a_module_does_not_replace_it(write: Write) -> None:
    script = write("model = Net(5)", "json.py")
    import json

    assert load_target(script, ["f32[1,5]"]).model.linear.in_features == 5
    assert sys.modules["json"] is json


# --- inputs


@pytest.mark.parametrize(
    ("body", "args", "kwargs"),
    [
        ("example_inputs = torch.ones(2, 4)", 1, []),
        ("example_inputs = {'x': torch.ones(2, 4)}", 0, ["x"]),
        ("def example_inputs(): return (torch.ones(2, 4),)", 1, []),
        ("def example_inputs(net): return [torch.ones(2, net.linear.in_features)]", 1, []),
    ],
)
def test_example_inputs(write: Write, body: str, args: int, kwargs: list[str]) -> None:
    found = load_target(write(f"model = Net()\n{body}"))
    assert (len(found.inputs.args), list(found.inputs.kwargs)) == (args, kwargs)
    assert found.model(*found.inputs.args, **found.inputs.kwargs).shape == (2, 4)
    assert found.inputs_from == "example_inputs in script.py"


def test_input_specs_come_first(write: Write) -> None:
    script = write("model = Net()\nexample_inputs = torch.ones(2, 4)\nNet.dummy_inputs = {'x': torch.ones(3, 4)}")
    found = load_target(script, ["x=f32[5,4]"])
    assert found.inputs.kwargs["x"].shape == (5, 4)
    assert found.inputs_from == "--input"
    assert load_target(script).inputs.args[0].shape == (2, 4)


def test_dummy_inputs_come_last(write: Write) -> None:
    found = load_target(write("model = Net()\nNet.dummy_inputs = {'x': torch.ones(3, 4)}"))
    assert found.inputs.kwargs["x"].shape == (3, 4)
    assert found.inputs_from == "the model's own dummy_inputs"


def test_made_inputs_lie_where_the_model_lies(write: Write) -> None:
    script = write("model = Net().to('meta')\nNet.dummy_inputs = {'x': torch.ones(3, 4)}")
    assert load_target(script, ["f32[5,4]"]).inputs.args[0].is_meta
    assert load_target(script).inputs.kwargs["x"].is_meta


# --- what goes wrong


def test_missing_script(write: Write) -> None:
    write("", "train_gpt.py")
    message = fails(TargetError, "trian_gpt.py:model")
    assert "trian_gpt.py does not exist" in message
    assert "Did you mean train_gpt.py?" in message
    assert "The current folder holds train_gpt.py" in message
    assert "There is no folder nowhere either" in fails(TargetError, "nowhere/x.py")
    assert ". is a folder, not a script" in fails(TargetError, ".")


def test_missing_module(write: Write) -> None:
    write("", "packageB/__init__.py", head="")
    write("", "packageB/inner.py")
    message = fails(TargetError, "packageB.inne:model")
    assert "there is no module 'packageB.inne'. Did you mean packageB.inner? packageB holds inner" in message
    assert "there is no module 'packageC'" in fails(TargetError, "packageC.inner:model")
    write("", "lonely.py")
    assert "Did you mean lonely.py?" not in fails(TargetError, "lonelx")
    message = fails(TargetError, "packageB.inner.Net")
    assert "packageB.inner is not a package; for a name inside it write packageB.inner:Net" in message


def test_nonsense(write: Write) -> None:
    write("")
    for target in ("", ":model", "a b", "1x:model"):
        assert "Give script.py, script.py:name, package.module:name, hf:model_type" in fails(TargetError, target)


def test_missing_name(write: Write) -> None:
    script = write("thing = Net()\ndef make(width): pass")
    message = fails(TargetError, f"{script}:thin")
    assert message == (
        "script.py has no 'thin'. Did you mean thing? It holds thing (a Net, line 13), Net (class, line 4), "
        "Wide (class, line 10, needs width, depth), make (function, line 14, needs width)"
    )


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        ("x = 3", "x", "script.py:x is a value of type int, not a model"),
        ("class C: pass", "C", "script.py:C is a class, but no nn.Module"),
        ("", "Wide", "script.py:Wide needs arguments: width, depth"),
        ("def f(): return 3", "f", "script.py:f returned a value of type int, not an nn.Module"),
        ("def f(*, size): return 3", "f", "script.py:f needs arguments: size"),
    ],
)
def test_wrong_kind(write: Write, body: str, name: str, what: str) -> None:
    assert what in fails(TargetError, f"{write(body)}:{name}")


def test_ambiguous(write: Write) -> None:
    message = fails(TargetError, write("a = Net()\nif True:\n    b = Net()"))
    assert "script.py does not say which model" in message
    lines = "a (a Net, line 13), b (a Net, line 15), Net (class, line 4), Wide (class, line 10, needs width, depth)"
    assert f"It holds {lines}. Name one of them: script.py:NAME" in message
    assert "attnres run" not in message
    # Which of two classes is the whole model cannot be guessed, even where only one can be made.
    assert "does not say which model" in fails(TargetError, write("", "classes.py"))
    message = fails(TargetError, write("x = 1", "none.py", head=""))
    assert message == "none.py holds no model. It holds no nn.Module and no function"


TRAINING = """
def build(config):
    return Net(config.width)
def main():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    return build(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        (TRAINING + "main()", "", "train.py ended the process (SystemExit: 2)"),
        (TRAINING + "if __name__ == '__main__':\n    main()", "", "train.py does not say which model"),
        (TRAINING + "if __name__ == '__main__':\n    main()", ":build", "train.py:build needs arguments: config"),
    ],
)
def test_a_script_that_builds_its_model_when_it_runs_is_to_be_run(
    write: Write, capfd: pytest.CaptureFixture[str], body: str, name: str, what: str
) -> None:
    message = fails(TargetError, write(body, "train.py") + name)
    assert what in message
    assert "with its model converted: attnres run train.py [ITS ARGUMENTS]" in message


def test_a_script_without_a_model_that_does_something_is_to_be_run(write: Write) -> None:
    message = fails(TargetError, write("if __name__ == '__main__':\n    print(1)", "job.py", head=""))
    assert "job.py holds no model. It holds no nn.Module and no function. Or run the script as it is" in message


def test_lines_are_told_for_modules_too(write: Write) -> None:
    write("", "package_of_lines/__init__.py", head="")
    write("a, b = Net(), Net()", "package_of_lines/inner.py")
    message = fails(TargetError, "package_of_lines.inner")
    assert "a (a Net, line 13), b (a Net, line 13)" in message
    assert "attnres run" not in message


def test_settings_are_for_configurations(write: Write) -> None:
    with pytest.raises(TargetError, match="--set width=3 is for hf: targets: script"):
        load_target(write("model = Net()"), (), ["width=3"])


def test_weights_are_no_script(write: Write) -> None:
    Path(write("", "model.pt", head="")).write_bytes(b"\x80\x02")
    message = fails(TargetError, "model.pt")
    assert "model.pt is not a Python script. Its name must end in .py; weights alone, and pickled models" in message


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("\n\nraise ValueError('no such\\nthing.')", "script.py failed: ValueError: no such\nthing (script.py:3)"),
        ("def f(:\n  pass", "script.py failed: SyntaxError: "),
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all' (script.py:1)"),
        ("import sys\nsys.exit(3)", "script.py ended the process (SystemExit: 3) (script.py:2)"),
        ("assert False", "script.py failed: AssertionError (script.py:1)"),
        ("import json\njson.loads('{')", "(script.py:2, raised at "),
    ],
)
def test_errors_inside_the_script(write: Write, body: str, what: str) -> None:
    script = write(body, head="")
    message = fails(TargetError, script)
    assert what in message
    assert "Traceback" not in message
    assert "script" not in sys.modules


def test_errors_of_a_module_are_not_a_missing_module(write: Write) -> None:
    write("import not_there_at_all", "module_d.py", head="")
    message = fails(TargetError, "module_d:model")
    assert "module_d failed: ModuleNotFoundError: No module named 'not_there_at_all' (module_d.py:1)" in message


def test_errors_of_the_builder(write: Write) -> None:
    script = write("def build():\n    return Net(width='x')")
    message = fails(TargetError, script)
    assert "script.py:build failed: TypeError: " in message
    assert "script.py:7, raised at torch/nn/modules/linear.py:" in message


def test_relative_imports_are_explained(write: Write) -> None:
    write("", "packageE/__init__.py", head="")
    message = fails(TargetError, write("from . import other", "packageE/inner.py", head=""))
    assert "attempted relative import" in message
    assert "name it as a module: packageE.inner:NAME" in message


def test_wrong_inputs(write: Write) -> None:
    message = fails(TargetError, write("model = Net()", "bare.py"))
    assert "no inputs for Net, whose forward takes (x)" in message
    assert "Define example_inputs in bare.py, or give --input" in message
    message = fails(InputsError, write("model = Net()\nexample_inputs = 'text'", "text.py"))
    assert "example_inputs in text.py: example inputs cannot be a value of type str" in message
    message = fails(TargetError, write("model = Net()\ndef example_inputs(a, b): pass", "two.py"))
    assert "example_inputs in two.py needs a, b" in message
    message = fails(TargetError, write("model = Net()\ndef example_inputs(): return 1 / 0", "zero.py"))
    assert "example_inputs in zero.py failed: ZeroDivisionError: division by zero (zero.py:14)" in message


def test_a_wrong_spec_is_told_before_anything_runs(write: Write) -> None:
    assert "'int65' is no dtype" in fails(TargetError, write("raise ValueError"), "int65[2]")


def test_random_state_is_the_scripts_own(write: Write) -> None:
    script = write("torch.manual_seed(3)\nmodel = Net()")
    load_target(script, ["f32[2,4]"])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    nn.Linear(4, 4)
    assert torch.equal(after, torch.get_rng_state())
