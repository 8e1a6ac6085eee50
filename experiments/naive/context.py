"""Ring attention: Liu et al. 2023, Ring Attention with Blockwise Transformers, section 3.

Every device has Q = T/N positions of all rows. Keys and values go round a ring, and each device adds up softmax(q k) v
over the blocks that pass, by the largest score so far. Blocks of later positions are masked: half of the work is idle.
Dims are those of model.py. jaxpar (parallel/context/ops/ring.py) deals positions out in zigzag order: all do as much.

    memory per device    parameters P, gradients P, momentum P; 1/N of the activations
    sent per step        keys and values N - 1 times a layer forwards, their gradients backwards; all-reduce P
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import K, N, T, Tree, ffn, norm, sgd

Q, RING = T // N, [(rank, (rank + 1) % N) for rank in range(N)]
mesh = jax.sharding.Mesh(jax.devices(), ("context",))
start = lambda params: place(params, mesh, {"outer": P(), "layers": P()})


def ring_attention(x_BQD: jax.Array, w: Tree) -> jax.Array:
    q, k, v = (jnp.einsum("bqd,dhk->bqhk", x_BQD, w[name]) for name in ("query", "key", "value"))
    rank, kv = lax.axis_index("context"), jnp.stack([k, v])
    at, most, total, out = jnp.arange(Q), -jnp.inf, 0.0, 0.0
    for hop in range(N):  # at first its own, so that each position has a score that is not masked
        kv = lax.ppermute(kv, "context", RING) if hop else kv
        later = ((rank - hop) % N) * Q + at > (rank * Q + at)[:, None]
        scores = jnp.where(later, -1e9, jnp.einsum("bqhk,bshk->bhqs", q, kv[0]) / K**0.5)
        before, most = most, lax.stop_gradient(jnp.maximum(most, scores.max(-1, keepdims=True)))
        weights_BHQS, shrink = jnp.exp(scores - most), jnp.exp(before - most)
        total = shrink * total + weights_BHQS.sum(-1, keepdims=True)
        out = shrink * out + jnp.einsum("bhqs,bshk->bhqk", weights_BHQS, kv[1])
    return jnp.einsum("bhqk,hkd->bqd", out / total, w["out"])


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P("context"), P(), P()), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    mine = lambda x, dim: lax.dynamic_slice_in_dim(x, lax.axis_index("context") * Q, Q, dim)
    now, following = mine(tokens[:, :-1], 1), mine(tokens[:, 1:], 1)

    def layer(x_BQD: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x_BQD = x_BQD + ring_attention(norm(x_BQD, w["norm_attention"]), w)
        return x_BQD + ffn(norm(x_BQD, w["norm_ffn"]), w), None

    def loss(params: Tree) -> jax.Array:
        x_BQD = (outer := params["outer"])["embed"][now] + mine(outer["position"], 0)
        x_BQD, _ = lax.scan(layer, x_BQD, params["layers"])
        log_BQV = jax.nn.log_softmax(norm(x_BQD, outer["norm"]) @ outer["head"])
        return -jnp.take_along_axis(log_BQV, following[..., None], axis=-1).mean() / N

    value, grads = jax.value_and_grad(loss)(params)
    vector, unravel = ravel_pytree(grads)
    return value[None], *sgd(params, momentum, unravel(lax.psum(vector, "context")))


if __name__ == "__main__":
    main(start, step)
