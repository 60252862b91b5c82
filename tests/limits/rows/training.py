"""Training loops, and derivatives beyond the gradient."""

from __future__ import annotations

from torch import nn

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.models import build, example

_FILE = "tests/conditions/test_function_transforms.py"


_LOOPS = "tests/conditions/test_training_loops.py"


def _dropout_on_the_stream() -> None:
    model = build(between=nn.Dropout(0.5))
    ac.transform(model, example(), config=ac.AttnResConfig(num_blocks=2, lowering="eager"))
    model.train()(example())


CONDITION = Condition(
    order=80,
    title="Training loops, torch.func, second derivatives",
    holds=(
        Holds(
            "Gradient accumulation, `zero_grad` with both settings of `set_to_none`, `clip_grad_norm_`, frozen parts "
            "and dropout: the original's steps, while the queries stay at zero",
            (
                f"{_LOOPS}::test_accumulation_zero_grad_and_clipping",
                f"{_LOOPS}::test_accumulated_gradients_are_the_sum",
                f"{_LOOPS}::test_clipping_counts_the_queries",
                f"{_LOOPS}::test_frozen_parts",
                f"{_LOOPS}::test_dropout_draws_the_original_s_masks",
                "tests/zoo/test_training.py::test_ten_steps_lower_the_loss_and_move_the_queries",
            ),
        ),
        Holds(
            "`torch.func`: `functional_call` with `grad`, `vmap` over inputs and over stacked weights, gradients per "
            "sample, `jvp`, `vjp`, `jacrev`, `hessian`. Under a transform a model runs op by op, whatever its "
            "`lowering`",
            (
                f"{_FILE}::test_grad_and_vmap_and_both",
                f"{_FILE}::test_an_ensemble_of_weights",
                f"{_FILE}::test_hessians",
                f"{_FILE}::test_samples_with_dropout_draw_masks_of_their_own",
                f"{_FILE}::test_a_model_that_is_lowered_to_inductor_is_transformed_op_by_op",
            ),
        ),
        Holds(
            'Second derivatives (gradient penalties) and forward mode with `lowering="eager"`, against a model that is '
            "written by hand from the definition",
            (f"{_FILE}::test_double_backward", f"{_FILE}::test_forward_mode"),
        ),
        Holds(
            "Second and third derivatives, forward mode and `vmap` of each operator, and of `ac.ops.depth_attention`",
            (
                "tests/kernels/test_differentiation.py::test_second_derivatives",
                "tests/kernels/test_differentiation.py::test_second_derivatives_of_sites",
                "tests/kernels/test_differentiation.py::test_third_derivatives",
                "tests/kernels/test_differentiation.py::test_forward_mode",
                "tests/kernels/test_differentiation.py::test_vmap_is_a_loop",
                "tests/kernels/test_differentiation.py::test_the_public_operation",
            ),
        ),
    ),
    notes=(
        "What Inductor compiles has a gradient and no second derivative, converted or not: PyTorch raises "
        "`RuntimeError: torch.compile with aot_autograd does not currently support double backward` "
        "(`tests/conditions/test_checkpointing.py::test_under_inductor_the_stream_is_not_lost`). Use "
        '`lowering="eager"` '
        "for gradient penalties.",
        "The gradient of the loss with respect to a returned state of the stream, as `autograd.grad` takes it for "
        "saliency maps, is another one than the original's even at zero queries: what comes behind reads the "
        "sources, of which that state is a mix, and no longer the state itself. Gradients of parameters and inputs "
        "are the original's. Take the gradient with respect to the input of the layer's branch or to its output, or "
        "`revert` the model first.",
        "`torch.compile` around a transform of a converted model (`torch.compile(torch.func.grad(f))`) is not "
        "needed, and computes the same or raises: where dynamo leaves the transform to Python it runs as above; "
        "where it traces through it, no weight in the graph is a parameter any more, and our `PlanMismatchError` "
        "comes wrapped into dynamo's `BackendCompilerFailed`. Call the transform without it.",
    ),
    limits=(
        Limit(
            what="a model with dropout on the stream itself, converted in evaluation mode and then trained",
            program=_dropout_on_the_stream,
            error=ac.PlanMismatchError,
            why="The sources could not share one mask of their sum.",
            instead="Move the dropout into the branches.",
        ),
    ),
)
