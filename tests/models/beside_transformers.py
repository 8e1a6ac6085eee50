"""Comparison of our models with those of transformers in float64, shared by the tests of every family's weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def reference(family: str, options: Mapping[str, Any]) -> Any:
    """Return the model `{family}ForCausalLM` of transformers with these options of config.json and random weights."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers: `make hf`")
    hf = pytest.importorskip("transformers", reason="needs torch and transformers: `make hf`")
    torch.manual_seed(0)
    keywords = {name: x for name, x in options.items() if name not in ("architectures", "torch_dtype", "model_type")}
    config = getattr(hf, f"{family}Config")(**keywords)
    config._experts_implementation = "eager"  # torch's grouped matmul does not exist for float64
    model = getattr(hf, f"{family}ForCausalLM")(config).double()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            # No weight at its initial value, so that each of them counts.
            spread = 0.2 if "norm" in name or "bias" in name else x.shape[-1] ** -0.5
            x.copy_(("norm" in name) + spread * torch.randn(x.shape, dtype=torch.float64))
    return model.eval()


def assert_same_logits(theirs: Any, ours: nnx.Module, params: Any, vocab: int) -> None:
    """Assert that a `reference` and our module compute the same logits in float64.

    Norms and routers compute in float32 in both models, so that a small difference remains.

    Args:
      theirs: a model of transformers.
      ours: our module; only its shapes are used.
      params: its parameters.
      vocab: the number of tokens.
    """
    torch = pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(0, vocab, (2, 31))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.float().numpy()
    with jax.enable_x64(True):
        state = nnx.state(ours)
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))
        nnx.update(ours, state)
        logits = np.asarray(ours(jnp.asarray(tokens, jnp.int32)), np.float32)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
