"""Scripts in the manner of Hugging Face transformers: a loop of their own, and the Trainer."""

from __future__ import annotations

from typing import Any

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
def llama():
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32))
"""


def trained(ran: Any) -> Any:
    assert ran.outcome.ending.error is None, ran.outcome.ending.error
    found = ran.outcome.conversion
    assert found.name == "LlamaForCausalLM"
    assert found.report.streams[0].owner == "model"
    assert len(found.queries()) == 4
    assert all(norm > 0 for norm in found.moved().values())
    return found


def test_a_loop_of_its_own(run: Any) -> None:
    """Its optimizer is built first, and finds a converted model: transformers' models know what to be called with."""
    ran = run(
        f"{LLAMA}"
        "model = llama()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "batch = torch.randint(0, 32, (4, 12))\n"
        "losses = []\n"
        "for _ in range(8):\n"
        "    outputs = model(input_ids=batch, labels=batch)\n"
        "    outputs.loss.backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    losses.append(outputs.loss.item())\n"
        "model.eval()\n"
        "made = [model.generate(batch[:, :4], max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False)]"
    )
    found = trained(ran)
    assert (found.when, found.inputs_from) == ("optimizer", "dummy_inputs")
    assert [held.how for held in found.held] == ["own"]
    assert ran.names["losses"][-1] < ran.names["losses"][0] - 0.1
    with_cache, without = ran.names["made"]
    assert with_cache.tolist() == without.tolist()


def test_generation_alone(run: Any) -> None:
    """The first call has a cache to write into, which the tracing must leave empty."""
    generate = (
        "torch.manual_seed(3)\nmodel = llama().eval()\n"
        "made = model.generate(PROMPT, max_new_tokens=4, do_sample=False)\n"
    )
    prompt = "PROMPT = torch.randint(0, 32, (2, 6))\n"
    ran = run(f"{LLAMA}{prompt}{generate}", keep=True)
    assert ran.outcome.conversion.name == "LlamaForCausalLM"
    assert ran.outcome.conversion.inputs is not None
    plain: dict[str, Any] = {}
    exec(f"import torch\ntorch.manual_seed(0)\n{LLAMA}{prompt}{generate}", plain)
    assert ran.names["made"].tolist() == plain["made"].tolist()


def test_the_trainer(run: Any, tmp_path: Any) -> None:
    ran = run(
        f"{LLAMA}"
        "from transformers import Trainer, TrainingArguments\n"
        "data = [{'input_ids': row, 'labels': row} for row in torch.randint(0, 32, (16, 12))]\n"
        f"arguments = TrainingArguments(output_dir={str(tmp_path / 'out')!r}, max_steps=4, use_cpu=True,\n"
        "    learning_rate=1e-2, report_to=[], save_steps=4, logging_steps=1, disable_tqdm=True)\n"
        "Trainer(model=llama(), args=arguments, train_dataset=data).train()\n"
    )
    found = trained(ran)
    assert [(held.optimizer, held.how, held.weight_decay) for held in found.held] == [("AdamW", "added", 0.0)]
