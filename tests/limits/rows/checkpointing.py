"""Activation checkpointing."""

from __future__ import annotations

from tests.limits.condition import Condition, Holds

CONDITION = Condition(
    order=10,
    title="Activation checkpointing",
    holds=(
        Holds(
            "Streams through checkpointed regions are found whole, converted and exact: layers, pairs of layers, "
            "single branches, some layers only, both settings of `use_reentrant`, selective checkpointing "
            "(`context_fn`)",
            (
                "tests/passes/test_checkpoint.py::test_exact_and_found_whole",
                "tests/passes/test_checkpoint.py::test_random_queries_give_what_they_give_without_checkpoints",
            ),
        ),
        Holds(
            "Regions inside regions, to any depth, with dropout in them: what is recomputed draws the masks that "
            "were drawn at first",
            (
                "tests/conditions/test_checkpointing.py::test_nested_regions",
                "tests/passes/test_checkpoint.py::test_dropout_draws_the_same_numbers_when_recomputed",
            ),
        ),
        Holds(
            "Hugging Face's `gradient_checkpointing_enable` in training mode, with either setting of "
            "`use_reentrant`: equal outputs and gradients, and less than half of the bytes kept for the backward pass",
            (
                "tests/conditions/test_checkpointing.py::test_gradient_checkpointing_enable",
                "tests/passes/test_checkpoint.py::test_memory_stays_low",
            ),
        ),
        Holds(
            "Every way in: `transform`, `torch.compile` with our backend around either kind of model, and a region "
            "around a whole converted model",
            (
                "tests/passes/test_checkpoint.py::test_every_way_in",
                "tests/test_not_dropped.py::test_inference_mode_and_checkpoint_run",
            ),
        ),
        Holds(
            "Under Inductor the stream is not lost, nested regions included",
            ("tests/conditions/test_checkpointing.py::test_under_inductor_the_stream_is_not_lost",),
        ),
    ),
    notes=(
        "dynamo makes no difference between the two settings of `use_reentrant`: a converted module's regions are "
        "recomputed as with `use_reentrant=False`, and so give gradients to `torch.autograd.grad` as well.",
    ),
)
