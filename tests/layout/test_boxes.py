"""`boxes.parts` finds the same parts of the model's leaves in a stored array as the layout's conversions."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.layout.boxes import parts, slices
from jaxpar.layout.leaves import Form, Leaf, Stacked, Staged, Whole

RANKS, INNER = 2, (4, 6)


def stored_in(form: Form, layers: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an array as the form stores it, with the padding of stages, and the model's own leaves in it."""
    stack = np.arange(1, 1 + layers * 24, dtype=np.float32).reshape(layers, *INNER)
    if isinstance(form, Whole):
        model_leaves = [stack]
    elif isinstance(form, Stacked) or form.dim is None:
        model_leaves = [*stack]
    else:
        model_leaves = [np.swapaxes(stack, 0, form.dim)]
    return np.asarray(form.to_stored([jnp.asarray(x) for x in model_leaves])), model_leaves


def boxes_of(shape: tuple[int, ...], form: Form) -> list[Any]:
    """Return the boxes of all devices: the stages or rows are split over ranks, the last dim over two devices."""
    rank_dim = len(form.held) - 1 if isinstance(form, Staged) else 0
    cuts = [[(0, n)] for n in shape]
    for dim, n in ((rank_dim, RANKS), (len(shape) - 1, 2)):
        size = shape[dim] // n
        cuts[dim] = [(k * size, (k + 1) * size) for k in range(n)]
    return [*itertools.product(*cuts)]


def test_parts_are_what_the_layout_has() -> None:
    """Stages in a loop and a V, with padding after the last; layers on dim 0, on dim 1, or as separate leaves."""
    forms: list[tuple[Form, int]] = [(Whole(), 4), (Stacked(), 4)]
    for layers, dim, (chunks, turned) in itertools.product((8, 7, 5), (0, 1, None), ((1, 0), (2, 0), (2, RANKS))):
        chunk_size = -(-layers // (RANKS * chunks)) * RANKS
        forms.append((Staged(layers, (chunks, chunk_size) if chunks > 1 else (chunk_size,), dim, turned), layers))
    for form, layers in forms:
        stored, model_leaves = stored_in(form, layers)
        leaf = Leaf("w", stored.shape, np.dtype("float32"), None, 0, form=form)
        assembled = [np.zeros_like(x) for x in model_leaves]
        for box in boxes_of(stored.shape, form):
            box_values = stored[slices(box, tuple((0, n) for n in stored.shape))]
            for part in parts(leaf, stored.shape, box):
                leaf_box = tuple((0, n) for n in assembled[part.member].shape)
                # Adding finds elements that two boxes claim.
                assembled[part.member][slices(part.box, leaf_box)] += part.view(box_values)
        for actual, expected in zip(assembled, model_leaves, strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=str(form))
