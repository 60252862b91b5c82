"""Which model of a script is converted, when, and what the script then computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnres_compile as ac
from attnres_compile.inputs import Inputs


def test_the_first_call_is_that_of_the_converted_model(run: Any) -> None:
    ran = run("model = Net()\nfirst = model(ids())\nsecond = model(ids())")
    found = ran.outcome.conversion
    assert (found.name, found.training, found.when, found.inputs_from) == ("Net", True, "first call", "call")
    assert ran.told == [
        "converted Net at its first call (training mode): 4 sublayers, 4 queries, 32 parameters; "
        "no optimizer holds its parameters yet"
    ]
    model, first = ran.names["model"], ran.names["first"]
    # Queries that are not zero tell the converted model from the plain one, so the first call is checked by its graph.
    assert "mix" in str(first.grad_fn.next_functions) or _reaches(first.grad_fn, next(iter(ran.queries.values())))
    assert torch.equal(first, ran.names["second"])
    plain = ac.revert(model)(torch.arange(10).reshape(2, 5))
    torch.testing.assert_close(first, plain)


def _reaches(node: Any, parameter: torch.Tensor) -> bool:
    left, seen = [node], set()
    while left:
        each = left.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        if getattr(each, "variable", None) is parameter:
            return True
        left += [following for following, _ in each.next_functions]
    return False


def test_losses_preprocessors_and_discriminators_are_passed_over(run: Any) -> None:
    ran = run(
        "plain, model, loss = Plain(), Net(), nn.CrossEntropyLoss()\n"
        "for _ in range(3):\n"
        "    plain(torch.randn(2, 20)); plain.layers[0](torch.randn(2, 20))\n"
        "    loss(torch.randn(2, 3), torch.zeros(2).long())\n"
        "    model(ids())\n"
    )
    assert ran.outcome.conversion.name == "Net"
    # Once, and neither its parts nor what has no parameters.
    assert [(each.module, each.kind) for each in ran.outcome.refused] == [("Plain", "NoStreamError")]
    assert len(ran.told) == 1


def test_two_models_the_first_is_converted_and_the_second_stays_plain(run: Any) -> None:
    ran = run("one, two = Net(), Net(depth=3)\none(ids())\ntwo(ids())")
    assert ac.report(ran.names["one"]).parameters_added == 32
    with pytest.raises(ac.NotTransformedError):
        ac.report(ran.names["two"])
    assert "1 other model of class Net" in ran.outcome.notes[0]


def test_only_the_outermost_call_counts(run: Any) -> None:
    ran = run(
        "class Outer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = Net()\n"
        "    def forward(self, x):\n"
        "        return self.net(x).mean()\n"
        "Outer()(ids())"
    )
    assert ran.outcome.conversion.name == "Outer"
    assert ran.outcome.conversion.report.streams[0].owner == "net"


@pytest.mark.parametrize(
    "context", ["torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)"]
)
def test_a_first_call_in_another_mode(run: Any, context: str) -> None:
    ran = run(
        "model = Net().eval()\n"
        f"with {context}:\n"
        "    outputs = model(ids())\n"
        "model.train()\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)"
    )
    assert ran.outcome.ending.error is None
    assert not ran.outcome.conversion.training
    assert "evaluation mode" in ran.told[0]
    assert all(norm > 0 for norm in ran.outcome.conversion.moved().values())


def test_inputs_of_inference_mode(run: Any) -> None:
    ran = run(
        "class Half(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))\n"
        "    def forward(self, x):\n"
        "        return self.blocks(x)\n"
        "model = Half()\n"
        "with torch.inference_mode():\n"
        "    model(torch.randn(2, 8))\n"
        "model(torch.randn(2, 8)).sum().backward()\n"
        "grads = [p.grad for p in model.parameters()]"
    )
    assert ran.outcome.ending.error is None
    assert all(grad is not None for grad in ran.names["grads"])


def test_random_state_and_arguments_are_as_without_us(run: Any) -> None:
    ran = run(
        "class Writes(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = Net()\n"
        "        self.register_buffer('calls', torch.zeros(()))\n"
        "    def forward(self, ids, cache):\n"
        "        self.calls += 1\n"
        "        cache['seen'] += 1\n"
        "        return self.net(ids) + torch.rand(())\n"
        "model, cache = Writes(), {'seen': torch.zeros(())}\n"
        "torch.manual_seed(5)\n"
        "model(ids(), cache)\n"
        "after = torch.rand(())\n"
        "torch.manual_seed(5)\n"
        "torch.rand(())\n"
        "expected = torch.rand(())"
    )
    names = ran.names
    assert ran.outcome.conversion is not None
    assert names["after"] == names["expected"]
    assert names["model"].calls == 1
    assert names["cache"]["seen"] == 1


def test_a_model_whose_first_call_fails_is_tried_again(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "try:\n"
        "    model(torch.randn(3))\n"
        "except RuntimeError as error:\n"
        "    failed = str(error)\n"
        "model(ids())"
    )
    assert "Expected tensor for argument" in ran.names["failed"]
    assert ran.outcome.conversion.name == "Net"
    assert [each.module for each in ran.outcome.refused] == ["Net"]


def test_nothing_to_convert(run: Any) -> None:
    ran = run("Plain()(torch.randn(2, 20))")
    assert ran.outcome.conversion is None
    assert ran.outcome.ending.code == 0
    assert ran.outcome.refused[0].reason.startswith("no residual stream was found")
    ran = run("print('no model')")
    assert ran.outcome.refused == ()


def test_a_model_that_the_script_has_transformed_itself_is_left_alone(run: Any) -> None:
    ran = run(
        "import attnres_compile as ac\n"
        "model = ac.transform(Net(), ids(), ac.AttnResConfig(lowering='eager'))\n"
        "model(ids())"
    )
    assert ran.outcome.conversion is None
    assert ran.outcome.refused[0].kind == "AlreadyTransformedError"


def test_traced_and_fake_calls_go_by_unseen(run: Any) -> None:
    ran = run(
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "torch.jit.trace(Net(), ids(), check_trace=False)\n"
        "torch.export.export(Net(), (ids(),))\n"
        "with FakeTensorMode():\n"
        "    Net()(torch.zeros(2, 5, dtype=torch.int64))\n"
        "torch.func.vmap(Net())(ids())\n"
    )
    assert ran.outcome.ending.error is None
    assert ran.outcome.conversion is None
    assert ran.outcome.refused == ()


def test_loaders_with_worker_processes(run: Any) -> None:
    ran = run(
        "class Data(torch.utils.data.Dataset):\n"
        "    scale = Net(depth=1)\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        self.scale(ids())\n"
        "        return ids()[0]\n"
        "model = Net()\n"
        "for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):\n"
        "    model(batch)\n"
    )
    assert ran.outcome.ending.error is None
    assert ran.outcome.conversion.report.parameters_added == 32
    # The calls in the workers are not ours to convert.
    assert ran.outcome.refused == ()


def test_the_inputs_and_the_model_are_kept_on_request(run: Any) -> None:
    source = "def main():\n    x = ids()\n    model = Net()\n    model(x)\n    x += 5\nmain()"
    found = run(source, keep=True).outcome.conversion
    assert torch.equal(found.inputs.args[0], torch.arange(10).reshape(2, 5))
    assert type(found.model).__name__ == "Net"
    found = run(source).outcome.conversion
    assert found.model is None
    assert found.inputs is None
    # The queries are there all the same.
    assert len(found.moved()) == 4
    assert list(found.parameters()) == [f"attnres.{key}" for key in found.stores[0][1].state_dict()]


def test_parameters_that_were_replaced_are_followed(run: Any) -> None:
    ran = run(
        "model = Net()\nmodel(ids())\n"
        "state = {k: torch.ones_like(v) for k, v in model.state_dict().items()}\n"
        "model.load_state_dict(state, assign=True)"
    )
    assert list(ran.outcome.conversion.moved().values()) == pytest.approx([8**0.5] * 4)


def test_ema_copies_are_named(run: Any) -> None:
    ran = run("model = Net()\nema = torch.optim.swa_utils.AveragedModel(model)\nmodel(ids())")
    assert "EMA" in ran.outcome.notes[0]


def test_given_inputs_convert_before_the_optimizer(run: Any) -> None:
    ran = run(
        "model = Net()\noptimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\ntrain(model, optimizer)",
        inputs=Inputs((torch.zeros(1, 3, dtype=torch.int64),)),
    )
    found = ran.outcome.conversion
    assert (found.when, found.inputs_from) == ("optimizer", "given")
    assert ran.told[0].startswith("converted Net before its optimizer is built (given inputs, training mode)")
    assert [(held.how, held.group) for held in found.held] == [("own", 0)]
    # Exactly what the script would have got from a model that was converted before.
    own = ran.names["optimizer"].param_groups[0]["params"]
    assert [id(p) for p in own] == [id(p) for p in ran.names["model"].parameters()]
    assert all(norm > 0 for norm in found.moved().values())


def test_given_inputs_that_do_not_fit(run: Any, capfd: Any) -> None:
    ran = run(
        "model = Net()\noptimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\ntrain(model, optimizer)",
        inputs=Inputs((torch.zeros(1, 3),)),
    )
    assert "the given inputs did not do before its optimizer was built" in ran.outcome.notes[0]
    # torch prints a traceback of a call that fails while it is traced.
    assert "Traceback" not in capfd.readouterr().err
    found = ran.outcome.conversion
    assert (found.when, found.inputs_from, [held.how for held in found.held]) == ("first call", "call", ["added"])


def test_given_inputs_are_for_the_model_with_a_stream(run: Any) -> None:
    ran = run(
        "generator, discriminator = Net(), Plain()\n"
        "theirs = torch.optim.Adam(discriminator.parameters())\n"
        "ours = torch.optim.Adam(generator.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    discriminator(generator(ids()).detach()).sum().backward()\n"
        "    theirs.step(); theirs.zero_grad()\n"
        "    discriminator(generator(ids())).sum().backward()\n"
        "    ours.step(); ours.zero_grad()",
        inputs=Inputs((torch.zeros(1, 3, dtype=torch.int64),)),
    )
    found = ran.outcome.conversion
    assert (found.name, found.when) == ("Net", "optimizer")
    assert ran.outcome.notes == ()
    assert len(ran.names["theirs"].param_groups[0]["params"]) == 4
    assert all(norm > 0 for norm in found.moved().values())


def test_dummy_inputs_convert_before_the_optimizer(run: Any) -> None:
    source = (
        "class Dummy(Net):\n"
        "    dummy_inputs = {'ids': DUMMY}\n"
        "model = Dummy()\n"
        "optimizer = torch.optim.AdamW(groups(model), lr=0.1)\n"
        "lengths = [len(group['params']) for group in optimizer.param_groups]\n"
        "train(model, optimizer)"
    )
    found = run(source.replace("DUMMY", "torch.zeros(2, 3, dtype=torch.int64)"))
    conversion = found.outcome.conversion
    assert (conversion.when, conversion.inputs_from) == ("optimizer", "dummy_inputs")
    # The script had chosen its groups before: they are added at once, to the one without weight decay.
    assert found.names["lengths"] == [6, 13 + 4]
    assert [(held.how, held.group, held.weight_decay) for held in conversion.held] == [("added", 1, 0.0)]
    # Dummies that do not fit are no reason to give up.
    conversion = run(source.replace("DUMMY", "torch.zeros(2, 3)")).outcome.conversion
    assert (conversion.when, conversion.inputs_from) == ("first call", "call")
