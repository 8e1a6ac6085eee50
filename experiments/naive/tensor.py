"""Tensor parallelism: Shoeybi et al. 2019, Megatron-LM, section 3.

Each device has H/N heads, F/N features of the feed-forward and V/N words. A product by a matrix of whose columns each
has a part (query, key, value, up, head) needs nothing sent; one by rows (out, down, embed) leaves each a part of a sum.
f before columns and g after rows (figure 3) are transposes: f all-reduces backwards, g forwards.

    memory per device    parameters P/N, gradients P/N, momentum P/N, but for norms and positions
    sent per layer       all-reduce 2 [B, T, D] forwards, 2 backwards

Dims are those of model.py. jaxpar (parallel/tensor/dims.py) rewrites a loss that knows nothing of f and g into
such a program; theirs are in parallel/tensor/edges.py.
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from model import N, Tree, V, attention, ffn, norm, sgd

mesh = jax.sharding.Mesh(jax.devices(), ("tensor",))
COLUMNS = dict.fromkeys(("query", "key", "value", "up"), P(None, None, "tensor"))  # [L, D, H, K], [L, D, F]
ROWS = dict.fromkeys(("out", "down"), P(None, "tensor"))  # [L, H, K, D], [L, F, D]
LAYERS = {"norm_attention": P(), "norm_ffn": P(), **COLUMNS, **ROWS}
SPECS = {"outer": {"embed": P("tensor"), "position": P(), "norm": P(), "head": P(None, "tensor")}, "layers": LAYERS}

f, g = jax.custom_vjp(lambda x: x), jax.custom_vjp(lambda x: lax.psum(x, "tensor"))
f.defvjp(lambda x: (f(x), None), lambda _, grad: (g(grad),))
g.defvjp(lambda x: (g(x), None), lambda _, grad: (f(grad),))
start = lambda params: place(params, mesh, SPECS)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P()), out_specs=(P(), SPECS, SPECS), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one device does with all rows of the batch and its parts of the parameters."""

    def layer(x_BTD: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x_BTD = x_BTD + g(attention(f(norm(x_BTD, w["norm_attention"])), w))
        return x_BTD + g(ffn(f(norm(x_BTD, w["norm_ffn"])), w)), None

    def loss(params: Tree) -> jax.Array:
        outer, words_V = params["outer"], lax.axis_index("tensor") * (V // N) + jnp.arange(V // N)
        hot_BTV = tokens[..., None] == words_V  # this device's words
        x_BTD = g(hot_BTV[:, :-1] @ outer["embed"]) + outer["position"]
        x_BTD, _ = lax.scan(layer, x_BTD, params["layers"])
        logits_BTV = f(norm(x_BTD, outer["norm"])) @ outer["head"]
        top_BT1 = lax.pmax(lax.stop_gradient(logits_BTV.max(-1, keepdims=True)), "tensor")
        sums = jnp.exp(logits_BTV - top_BT1).sum(-1), ((logits_BTV - top_BT1) * hot_BTV[:, 1:]).sum(-1)
        total_BT, target_BT = g(jnp.stack(sums))
        return (jnp.log(total_BT) - target_BT).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, *sgd(params, momentum, grads)


if __name__ == "__main__":
    main(start, step)
