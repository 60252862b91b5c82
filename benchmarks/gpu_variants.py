"""The models of ``gpu_models.py``, their steps, and what its helpers do with them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import gpu_timing
import torch
from torch import Tensor, nn

import attnres_compile as ac

ORIGINAL, UNFUSED, FUSED = "original", "unfused", "fused"
VARIANTS = (ORIGINAL, UNFUSED, FUSED)
MODES = ("inference", "training")
# Largest relative error in float32 between a model and its conversion with zero queries.
EXACT = 1e-5


# ------------------------------------------------------------------ models


def build(options: argparse.Namespace, dtype: torch.dtype, layers: int | None = None, width: int | None = None) -> Any:
    """A Hugging Face Llama with random weights, made on the device in ``dtype``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = width or options.width
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=width,
        intermediate_size=width * 43 // 16 // 16 * 16,
        num_hidden_layers=layers or options.layers,
        num_attention_heads=max(1, width // 128),
        max_position_embeddings=max(4096, options.tokens),
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(options.device):
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def twin(model: nn.Module) -> Any:
    """A copy of the modules over the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


def sample(options: argparse.Namespace) -> Tensor:
    """The sequence, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, options.vocabulary, (1, options.tokens), generator=generator).to(options.device)


def configuration(variant: str, options: argparse.Namespace) -> ac.AttnResConfig:
    """What a variant is converted with."""
    config = ac.AttnResConfig(num_blocks=options.blocks)
    return replace(config, two_phase="off", fuse="off") if variant == UNFUSED else config


def variant_of(model: nn.Module, variant: str, options: argparse.Namespace) -> Any:
    """A twin of ``model``, converted unless it is to be the original."""
    made = twin(model)
    if variant != ORIGINAL:
        ac.transform(made, {"input_ids": sample(options)}, configuration(variant, options))
    return made


def compiled(model: nn.Module, variant: str, options: argparse.Namespace) -> Any:
    """By ``torch.compile``; in a smoke test, which has no time for Inductor, by backends that run op by op."""
    if not options.smoke:
        return torch.compile(model, dynamic=False)
    if variant == ORIGINAL:
        return torch.compile(model, dynamic=False, backend="eager")
    return torch.compile(model, dynamic=False, backend="attnres", options={"lowering": "eager"})


@contextlib.contextmanager
def kernels(variant: str) -> Iterator[None]:
    """While a variant runs, which is when it is compiled: without generated kernels where it is to have none."""
    if variant != UNFUSED:
        yield
        return
    from attnres_compile.kernels import launch

    with mock.patch.object(launch, "served", return_value=False):
        yield


def randomise_queries(models: Sequence[nn.Module], dim: int) -> None:
    """The same random queries for all: logits of deviation 1."""
    generator = torch.Generator().manual_seed(2)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for model in models:
            for name, query in ac.pseudo_queries(model).items():
                if name not in values:
                    values[name] = (torch.randn(dim, generator=generator) * dim**-0.5).bfloat16()
                query.copy_(values[name])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, in float32."""
    return nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])


def step_of(
    model: Any, call: Any, variant: str, mode: str, tokens: Tensor, options: argparse.Namespace
) -> Callable[[], None]:
    """One step of a mode; ``call`` is the compiled ``model``."""
    if mode == "inference":

        def infer() -> None:
            with torch.no_grad(), kernels(variant):
                call(input_ids=tokens)

        return infer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=options.device == "cuda")

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        with kernels(variant):
            loss_of(call(input_ids=tokens).logits, tokens).backward()
        optimizer.step()

    return train


def same_caches() -> None:
    """Compile the original with this package's pass in place as well, which leaves it as it is.

    The pass is part of the keys of Inductor's caches, and is in place in a process that has converted a model.
    """
    from attnres_compile.inductor_pass import install

    install()


# ------------------------------------------------------------------ jobs of the helpers


def _compile(job: Mapping[str, Any], options: argparse.Namespace, say: Callable[[str, Any], None]) -> None:
    """Compile one variant with nothing else in the process: seconds of the first step, and peak memory of the third."""
    torch._dynamo.reset()
    same_caches()
    variant, tokens = job["variant"], sample(options)
    model = variant_of(build(options, torch.bfloat16), variant, options)
    call = compiled(model, variant, options)
    for mode in job["parts"]:
        model.train(mode == "training")
        step = step_of(model, call, variant, mode, tokens, options)
        start = time.perf_counter()
        step()
        _wait(options)
        seconds = time.perf_counter() - start
        step()
        peak = _peak(step, options)
        say(mode, {"seconds": seconds, "peak": peak})
        del step
        for parameter in model.parameters():
            parameter.grad = None


def _verify(options: argparse.Namespace, say: Callable[[str, Any], None]) -> None:
    """A small copy in float32, converted as by default, against its original."""
    torch._dynamo.reset()
    small = replace_options(options, tokens=min(options.tokens, 128))
    model = build(small, torch.float32, layers=4 if not options.smoke else 3, width=min(512, options.width))
    config = ac.AttnResConfig(num_blocks=2, lowering="eager" if options.smoke else "inductor")
    found = ac.verify(model, {"input_ids": sample(small)}, config)
    say(
        "verify",
        {
            "outputs": found.output_error,
            "gradients": found.gradient_error,
            "compared": found.gradients,
            "holds": found.holds and found.tolerance <= EXACT,
        },
    )


def replace_options(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **changes})


def _wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _peak(step: Callable[[], None], options: argparse.Namespace) -> int:
    """Most bytes allocated on the device during a step, weights and optimizer states included; 0 on the CPU."""
    if options.device != "cuda":
        step()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def handle(job: Mapping[str, Any], options: argparse.Namespace, say: Callable[[str, Any], None]) -> None:
    """Do one job of a helper."""
    said: set[str] = set()

    def once(part: str, value: Any) -> None:
        said.add(part)
        say(part, value)

    try:
        if job["do"] == "verify":
            _verify(options, once)
        else:
            _compile(job, options, once)
    except Exception as error:
        text = str(error).strip().splitlines()
        for part in job["parts"]:
            if part not in said:
                say(part, {"raised": f"{type(error).__name__}: {text[0] if text else ''}"[:300]})
        gpu_timing.end_if_ruined(torch.device(options.device))
    gc.collect()
