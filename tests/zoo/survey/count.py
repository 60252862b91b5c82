"""An independent count of a model's residual sublayers, by forward hooks on its modules and derivatives.

It shares nothing with the package's detector: no FX graph, no list of operators, and of classes it knows batch norms
only. What is read is autograd's record of one eager forward.

The rule
--------
One forward runs in eval mode and float64. Every module that calls no other module is a *box*: what it returns is
detached and becomes a variable. So what autograd records is the code between the boxes. A module that hands its input
on belongs to that code, be it laid out anew, times fixed scales, or plus a constant: ``Identity``, dropout in eval
mode, a layer scale; but not a batch norm, nor another module that scales its one input and shifts it as well, which is
a norm with fixed statistics. Of a box that returns an input when its weight matrices are zero, or where it has none,
when its other inputs are zero, only what it adds to that input is a variable; of several such inputs it is the one that
was made first. A module that calls others is a box, too, if it contracts its input with weights of its own beside them
and does not hand it on.

- A value v *carries* an earlier value s of the same number of elements when the derivative of v by s, through the code
  between the boxes, is the identity up to a re-ordering of the elements and factors that are constant along all
  dimensions but one. ``v = a * s + f`` carries s; ``norm(s + f)``, ``relu(s + f)`` and ``t * s + (1 - t) * f`` with a
  t that is computed from data do not. What carries v carries s too.
- A *state* is a value that is read: it enters a box, or it is used at least twice, or the model returns it. Values that
  carry one another and hold nothing more are one state.
- A *sublayer* leads from state s to state v when v carries s and holds outputs of boxes that s does not hold. Of
  several states that v carries it starts from the last; of several that do not carry one another, from the one that
  the others are computed from. Attention and MLP that read one state and are both added before the sum is read are one
  sublayer.
- It is *learned* when some of those outputs are computed from s by way of a weight matrix: a parameter or buffer with
  two dimensions or more of more than one element. Others (pooling, a Fourier transform, an addend from elsewhere)
  count where they stand between learned ones.
- A *stream* is a longest chain of sublayers. Of several sublayers on one state the chain goes on with the one whose
  branch is computed from the others (a skip around them); between independent ones with the longer chain. What does
  not go on is a stream of its own. Chains of fewer than three sublayers are none.
- *Post-norm*: a stream that starts from what one weightless step (a norm without a matrix, an activation) makes of the
  end of another stream, and the other stream, are none, unless one is more than twice as long as the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.zoo.survey.chains import Chain, chains
from tests.zoo.survey.hooked import record
from tests.zoo.survey.states import Values, states

# As many sublayers make a stream: the default of ``AttnResConfig.min_sublayers``.
LEAST = 3


@dataclass(frozen=True)
class Count:
    """The residual streams of a model.

    Attributes:
        streams: for each stream, in the order of their first sublayers, the module path of each sublayer in depth
            order: the outermost module whose output is added. Modules that make one sublayer together are joined
            by " + ".
        notes: what could not be decided, and why.
    """

    streams: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of sublayers of each stream."""
        return tuple(len(stream) for stream in self.streams)


def count(model: nn.Module, inputs: Mapping[str, Any], least: int = LEAST) -> Count:
    """Counts the residual sublayers of ``model``, which is not changed.

    Args:
        model: with random values in all its parameters: zeros and ones hide what is added.
        inputs: keyword arguments of one call.
        least: shorter streams are left out.
    """
    recording = record(model, inputs)
    values = Values(recording)
    found = chains(values, states(values), least)
    return Count(tuple(_names(values, chain) for chain in found), tuple(recording.notes))


def _names(values: Values, chain: Chain) -> tuple[str, ...]:
    return tuple(values.names(step.before.member, step.after.member) for step in chain.steps)
