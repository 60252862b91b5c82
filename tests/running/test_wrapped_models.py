"""Models inside torch.compile and data parallelism."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from attnres_compile.conversion import ConvertedForward
from attnres_compile.inputs import Inputs

ROOT = Path(__file__).parents[2]


def trained(ran: Any) -> None:
    assert ran.outcome.ending.error is None
    assert all(norm > 0 for norm in ran.outcome.conversion.moved().values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "build", ["compiled = torch.compile(model, backend=BACKEND)", "model.compile(backend=BACKEND)"]
)
def test_a_backend_that_cannot_carry_the_queries_is_left_out(run: Any, backend: str, build: str) -> None:
    ran = run(
        f"BACKEND = {backend!r}\nmodel = compiled = Net()\n{build}\n"
        "optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)\ntrain(compiled, optimizer)"
    )
    trained(ran)
    assert any("cannot carry the depth attention" in note for note in ran.outcome.notes)


@pytest.mark.parametrize(
    "build", ["compiled = torch.compile(model, backend=BACKEND)", "model.compile(backend=BACKEND)"]
)
def test_a_backend_that_carries_them_compiles_the_converted_model(run: Any, build: str) -> None:
    """Our own here, which runs op by op; plain Inductor goes the same way."""
    ran = run(
        "from attnres_compile import backend\n"
        "counted = []\n"
        "def BACKEND(graph, inputs, **kwargs):\n"
        "    counted.append(len([n for n in graph.graph.nodes if 'declare' in str(n.target)]))\n"
        "    return backend.attnres(graph, inputs, options={'lowering': 'eager'})\n"
        "BACKEND.__name__ = 'attnres'\n"
        f"model = compiled = Net()\n{build}\n"
        "optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)\ntrain(compiled, optimizer)"
    )
    trained(ran)
    assert ran.outcome.notes == ()
    assert ran.names["counted"] == [1]
    # It is the compiled call that ran, not the converted module's own.
    assert ran.names["model"].__dict__["forward"]._compiled is None


def test_a_compiled_step_that_calls_the_model(run: Any) -> None:
    ran = run(
        "from attnres_compile import backend\n"
        "def carrier(graph, inputs, **kwargs):\n"
        "    return backend.attnres(graph, inputs, options={'lowering': 'eager'})\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "seen = []\n"
        "@torch.compile(backend=carrier)\n"
        "def step(x):\n"
        "    seen.append(torch.compiler.is_compiling())\n"
        "    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())\n"
        "for _ in range(3):\n"
        "    step(ids()).backward()\n"
        "    optimizer.step()\n"
    )
    trained(ran)
    assert isinstance(ran.names["model"].__dict__["forward"], ConvertedForward)
    assert ran.names["seen"] == [False, True, True]


def test_compiled_functions_are_not_eager_for_long(run: Any) -> None:
    step = (
        "plain = Plain()\n"
        "fast = torch.compile(lambda x: seen.append(torch.compiler.is_compiling()) or x + 1, backend='eager')\n"
    )
    ran = run(f"seen = []\n{step}fast(ids())\nfor _ in range(20):\n    plain(torch.randn(2, 20))\nfast(ids())")
    assert ran.names["seen"] == [False, True]
    ran = run(
        f"seen = []\n{step}fast(ids())\nplain(torch.randn(2, 20)).sum().backward()\n"
        "torch.optim.SGD(plain.parameters(), lr=0.1).step()\nfast(ids())"
    )
    assert ran.names["seen"] == [False, True]


def test_a_compiled_module_from_before_the_optimizer_or_after_the_conversion(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "before = torch.compile(model, backend='eager')\n"
        "optimizer = torch.optim.SGD(before.parameters(), lr=0.1)\n"
        "after = torch.compile(model, backend='eager')\n"
        "train(before, optimizer)\ntrain(after, optimizer)",
        inputs=Inputs((torch.zeros(1, 3, dtype=torch.int64),)),
    )
    trained(ran)
    assert ran.outcome.conversion.when == "optimizer"
    assert len(ran.outcome.notes) == 2


def test_a_stance_that_the_script_takes_around_its_first_call(run: Any) -> None:
    ran = run(
        "seen = []\nmodel = Net()\n"
        "fast = torch.compile(lambda x: seen.append(torch.compiler.is_compiling()) or x + 1, backend='eager')\n"
        "with torch.compiler.set_stance('default'):\n"
        "    model(ids())\n"
        "fast(ids())"
    )
    assert ran.outcome.conversion is not None
    assert ran.names["seen"] == [True]


def test_blocks_compiled_one_by_one(run: Any) -> None:
    ran = run(
        "model = Net()\n"
        "for block in model.blocks:\n"
        "    block.compile(backend='eager')\n"
        "model.head.compile(backend='eager')\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.1))"
    )
    trained(ran)


def test_data_parallel_on_the_cpu(run: Any) -> None:
    ran = run("model = nn.DataParallel(Net())\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.1))")
    trained(ran)
    assert ran.outcome.conversion.name == "Net"


def test_accelerate_style_forwards(run: Any) -> None:
    ran = run(
        "import functools\n"
        "model = Net()\n"
        "model.forward = functools.wraps(model.forward)(lambda *a, _f=model.forward, **k: _f(*a, **k).float())\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.1))"
    )
    trained(ran)


DISTRIBUTED = """
import os, torch
import torch.distributed as dist
from tiny import *
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = Net()
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(3):
    optimizer.zero_grad()
    with ddp.no_sync():
        x = torch.randint(0, 20, (2, 5))
        F.cross_entropy(ddp(x).flatten(0, 1), x.flatten()).backward()
    x = torch.randint(0, 20, (2, 5))
    F.cross_entropy(ddp(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(others, mine)
print(sum("attnres" in n for n, _ in model.named_parameters()), (others[0] - others[1]).abs().max().item() < 1e-6)
dist.barrier()
dist.destroy_process_group()
"""


def test_queries_stay_equal_over_processes(tmp_path: Path) -> None:
    """DistributedDataParallel, built before the conversion, knows nothing of the queries."""
    shutil.copy(Path(__file__).parent / "scripts" / "tiny.py", tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(DISTRIBUTED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = "from attnres_compile.cli.main import run\nrun()"
    processes = []
    for rank in ("0", "1"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": rank, "LOCAL_RANK": rank}
        env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        call = [sys.executable, "-c", code, "run", str(tmp_path / "train.py")]
        processes.append(subprocess.Popen(call, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    (out, err), (other_out, other_err) = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], err + other_err
    assert out == other_out == "4 True\n"
    assert "gradients are averaged beside it" in " ".join(err.split())
    # One of them speaks for all.
    assert "attnres" not in other_err
