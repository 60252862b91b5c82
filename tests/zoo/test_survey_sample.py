"""A sample of the survey is measured again: one model per block design of the libraries that tests are run with.

The rows on file may be of other versions of torch and the libraries than those that are installed here. What is
compared - how many sublayers there are and were converted, and why not - is the same in all of them; numbers are
not compared, since a row that says ``converted`` has been held to its tolerance by ``measure``.
"""

from __future__ import annotations

import pytest

from tests.zoo.survey import catalogue, rows
from tests.zoo.survey.measure import measure

SAMPLE = (
    "torch/layers/encoder-pre-norm-no-bias",
    "torch/layers/encoder-decoder-pre-norm-sequence-first-relu",
    "torch/layers/encoder-post-norm-no-bias",
    # What a residual can be.
    "x-transformers/configurations/constant-scaled-residual",
    "x-transformers/configurations/cross-attention-scaled-residual",
    "x-transformers/configurations/gated-residual",
    "x-transformers/configurations/hyper-connections",
    "x-transformers/configurations/layer-memory",
    "x-transformers/configurations/macaron",
    "x-transformers/configurations/mean-variance-residual",
    "x-transformers/configurations/shared-layers",
    "x-transformers/configurations/unet-skips",
    # Serial, parallel, normed branches, scaled branches, experts, learned positions, no positions.
    "transformers/causal-lm/llama",
    "transformers/causal-lm/gptj",
    "transformers/causal-lm/gemma3_text",
    "transformers/causal-lm/granite",
    "transformers/causal-lm/mixtral",
    "transformers/causal-lm/opt",
    "transformers/causal-lm/bloom",
    "transformers/masked-lm/albert",
    "transformers/seq2seq/t5",
    # Tokens, windows, channels first, post-activation, a convolutional front.
    "transformers/vision/vit",
    "transformers/vision/swin",
    "transformers/vision/convnext",
    "transformers/vision/resnet",
    "transformers/audio/wav2vec2",
)
ON_FILE = rows.read()


@pytest.mark.parametrize("name", SAMPLE)
def test_the_row_on_file_is_measured_again(name: str) -> None:
    row = measure(catalogue.by_name(name.split("/")[0])[name])
    known = ON_FILE[name]
    assert (row.status, row.expected, row.found, row.reason) == (
        known.status,
        known.expected,
        known.found,
        known.reason,
    ), row.detail
