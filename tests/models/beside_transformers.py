"""transformers' own models in float64, beside which ours are held: what the tests of each family's weights share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def reference(family: str, stated: Mapping[str, Any]) -> Any:
    """transformers' `family` + ForCausalLM of a config.json, with weights of which none is at its initial value."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers: `make hf`")
    hf = pytest.importorskip("transformers", reason="needs torch and transformers: `make hf`")
    torch.manual_seed(0)
    given = {name: x for name, x in stated.items() if name not in ("architectures", "torch_dtype", "model_type")}
    settings = getattr(hf, f"{family}Config")(**given)
    settings._experts_implementation = "eager"  # its grouped matmul is not there in float64
    model = getattr(hf, f"{family}ForCausalLM")(settings).double()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            spread = 0.2 if "norm" in name or "bias" in name else x.shape[-1] ** -0.5
            x.copy_(("norm" in name) + spread * torch.randn(x.shape, dtype=torch.float64))
    return model.eval()


def assert_same_logits(theirs: Any, ours: nnx.Module, params: Any, vocab: int) -> None:
    """Of `reference` and of our module (shapes alone) with these parameters, in float64.

    Norms and routers compute in float32 in both: that is the difference that is left.
    """
    torch = pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(0, vocab, (2, 31))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.float().numpy()
    with jax.enable_x64(True):
        state = nnx.state(ours)
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))
        nnx.update(ours, state)
        got = np.asarray(ours(jnp.asarray(tokens, jnp.int32)), np.float32)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
