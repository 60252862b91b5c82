"""A Hugging Face Llama becomes an Attention Residuals model: look, convert, check, train, generate, undo.

    python examples/llama.py                    # the whole story, half a minute on a CPU
    attnres inspect examples/llama.py           # what would be converted
    attnres verify examples/llama.py            # exactness at zero queries, in numbers

The model is small and its weights are random, but the classes are transformers' own; with a checkpoint of yours
only the first lines differ: ``model = AutoModelForCausalLM.from_pretrained(...)``.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnres_compile as ac
from attnres_compile.exactness import verify

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,  # tokens are bytes: no tokenizer to download
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
)
example_inputs = {"input_ids": torch.randint(0, 256, (2, 64))}

# "eager" runs the converted graph op by op and starts at once; "inductor", the default, compiles kernels.
config = ac.AttnResConfig(num_blocks=4, lowering="eager")

STEPS = 150
BATCH, LENGTH = 8, 64


def main() -> None:
    started = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains nothing from more

    print("1. explain: what is there to convert? (changes nothing)")
    show(ac.explain(model, example_inputs, config))

    print("\n2. verify: on a copy with randomised weights, queries at zero")
    exact = verify(model, example_inputs, config)
    print(f"   outputs differ by {exact.output_error:.1e}, gradients by {exact.gradient_error:.1e} (relative)")
    print(f"   allowed in {exact.dtype}: {exact.tolerance:.0e} -> {'exact' if exact.holds else 'NOT EXACT'}")

    print("\n3. transform: in place, before the optimizer is built")
    keys = set(model.state_dict())
    ac.transform(model, example_inputs, config)
    queries = ac.pseudo_queries(model)
    print(f"   {len(queries)} queries, all zero; {len(set(model.state_dict()) - keys)} new state_dict keys")

    print(f"\n4. train: {STEPS} steps on the bytes of this very file")
    train(model)
    print("   how far each query moved from zero, in depth order:")
    lengths = {name: query.norm().item() for name, query in queries.items()}
    for name, length in lengths.items():
        print(f"   {length:7.3f} {'#' * round(30 * length / max(lengths.values())):30} {name}")

    print("\n5. generate, with the key-value cache, through the model's own generate()")
    model.eval()
    prompt = torch.tensor([list(b"import ")])
    cached, recomputed = (
        model.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=use_cache)[0].tolist()
        for use_cache in (True, False)
    )
    print(f"   {bytes(cached).decode(errors='replace')!r}")
    print(f"   the same tokens without the cache: {cached == recomputed}")

    print("\n6. revert: the plain Llama again")
    ac.revert(model)
    print(f"   state_dict keys as before: {set(model.state_dict()) == keys}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")


def show(report: ac.TransformReport) -> None:
    """A report is plain data; ``attnres inspect`` shows all of it."""
    for stream in report.streams:
        sizes = ", ".join(str(len(block)) for block in stream.blocks)
        print(f"   stream {stream.name}: {len(stream.sublayers)} sublayers of {stream.feature_dim} features")
        print(f"   {len(stream.blocks)} blocks of {sizes} sublayers; {len(stream.sites)} places read the stream")
    print(f"   {report.parameters_added} parameters to add; {len(report.rejections)} adds are left alone:")
    for reason in sorted({rejection.reason for rejection in report.rejections}):
        same = [rejection for rejection in report.rejections if rejection.reason == reason]
        print(f"   - {reason} ({len(same)}): {same[0].message}")


def train(model: torch.nn.Module) -> None:
    data = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model.train()
    for step in range(1, STEPS + 1):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, STEPS) or step % 50 == 0:
            print(f"   step {step:3}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
