"""A box of a stored array is told which parts of the model's own leaves it holds, as the layout itself has them."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.layout.boxes import parts, slices
from jaxpar.layout.leaves import Form, Leaf, Stacked, Staged, Whole

RANKS, INNER = 2, (4, 6)


def stored_in(form: Form, layers: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """An array as the form stores it, padding of stages included, and the model's own leaves in it."""
    whole = np.arange(1, 1 + layers * 24, dtype=np.float32).reshape(layers, *INNER)
    if isinstance(form, Whole):
        own = [whole]
    elif isinstance(form, Stacked) or form.dim is None:
        own = [*whole]
    else:
        own = [np.swapaxes(whole, 0, form.dim)]
    return np.asarray(form.to_stored([jnp.asarray(x) for x in own])), own


def boxes_of(shape: tuple[int, ...], form: Form) -> list[Any]:
    """Each rank's stages, or rows, of which two devices have half of the last dim each."""
    along = len(form.held) - 1 if isinstance(form, Staged) else 0
    cuts = [[(0, n)] for n in shape]
    for dim, n in ((along, RANKS), (len(shape) - 1, 2)):
        size = shape[dim] // n
        cuts[dim] = [(k * size, (k + 1) * size) for k in range(n)]
    return [*itertools.product(*cuts)]


def test_parts_are_what_the_layout_has() -> None:
    """Stages in a loop and a V, with padding behind the last, of layers on dim 0 or 1 or one by one."""
    forms: list[tuple[Form, int]] = [(Whole(), 4), (Stacked(), 4)]
    for layers, dim, (chunks, turned) in itertools.product((8, 7, 5), (0, 1, None), ((1, 0), (2, 0), (2, RANKS))):
        each = -(-layers // (RANKS * chunks)) * RANKS
        forms.append((Staged(layers, (chunks, each) if chunks > 1 else (each,), dim, turned), layers))
    for form, layers in forms:
        stored, own = stored_in(form, layers)
        leaf = Leaf("w", stored.shape, np.dtype("float32"), None, 0, form=form)
        found = [np.zeros_like(x) for x in own]
        for box in boxes_of(stored.shape, form):
            here = stored[slices(box, tuple((0, n) for n in stored.shape))]
            for part in parts(leaf, stored.shape, box):
                whole = tuple((0, n) for n in found[part.member].shape)
                found[part.member][slices(part.box, whole)] += part.view(here)  # each element once
        for a, b in zip(found, own, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(form))
