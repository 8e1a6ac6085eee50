"""ZeRO-2 and ZeRO-3 train steps written by hand for one model: what jaxpar's compiled steps are measured against.

One `shard_map` holds the whole step: a forward scan that stashes layer inputs, a reversed scan that recomputes each
layer and scatters its gradients, head and embedding, AdamW on shards. Nothing here is general; no step uses jaxpar.

    # both, for 8 H100s that are not there: memory, collectives
    JAX_PLATFORMS=cpu python experiments/benchmarks/handwritten.py

Temporaries in GB per device (jax 0.10.2), from plain scans and `psum_scatter` to what is below:

| | zero3 | zero2 |
|-|-|-|
| plain | 6.5 | 4.2 |
| the head's gradient is scattered before the backward scan begins (otherwise: at the end) | 4.8 | 3.9 |
| large leaves are scattered in pieces, so that the whole never exists in float32 | 5.6 | 4.1 |
| buffers that loops fill are created when the loop begins (otherwise: long before) | 3.6 | 6.0 |
| new bf16 weights are written over the old ones (zero2), not into new stacks | 3.6 | 2.3 |
| the head's scatter waits for the gradient of its input, when its weights are no longer needed | 2.8 | 2.3 |

What is left is the backward of one layer, half of it attention scores [H, T, T], and the gradients' own shards (4P/N).

Dims: L layers, D model, H query heads, G key-value heads, C head, F feed-forward, V vocabulary, B rows, T sequence.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any


@dataclasses.dataclass(frozen=True)
class Config:
    """Widths of Llama-3-8B, with 8 of its 32 layers."""

    layers: int = 8
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    sequence: int = 2048


def model_fns(config: Config = Config()) -> tuple[Callable[[jax.Array], Tree], Callable[..., jax.Array]]:
    """The plain model: `init(key) -> params` (float32), `loss(params, batch, key=None) -> scalar` mean over rows.

    batch: {"tokens": int32 [B, T+1]}. The model computes in the dtype of its params; norms, softmax and the loss in
    float32. No remat: the step decides on that.
    """
    c = config.dim // config.heads
    shapes = {
        "embed": (config.vocab, config.dim),
        "layers": {
            "attention_norm": (config.layers, config.dim),
            "query": (config.layers, config.dim, config.heads * c),
            "key": (config.layers, config.dim, config.kv_heads * c),
            "value": (config.layers, config.dim, config.kv_heads * c),
            "out": (config.layers, config.heads * c, config.dim),
            "ffn_norm": (config.layers, config.dim),
            "gate": (config.layers, config.dim, config.ffn),
            "up": (config.layers, config.dim, config.ffn),
            "down": (config.layers, config.ffn, config.dim),
        },
        "norm": (config.dim,),
        "head": (config.dim, config.vocab),
    }

    def init(key: jax.Array) -> Tree:
        paths, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda s: isinstance(s, tuple))
        keys = jax.random.split(key, len(paths))
        leaves = [
            jnp.ones(s)
            if "norm" in path[-1].key
            else jax.random.normal(k, s) * (0.02 if s[0] == config.vocab else s[-2] ** -0.5)
            for k, (path, s) in zip(keys, paths, strict=True)
        ]
        return tree.unflatten(leaves)

    def loss(params: Tree, batch: Tree, key: jax.Array | None = None) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x_BTD = params["embed"][inputs]
        x_BTD, _ = lax.scan(lambda x, w: (layer(config, w, x), None), x_BTD, params["layers"])
        return cross_entropy(params["norm"], params["head"], x_BTD, targets)

    return init, loss


def rms_norm(scale_D: jax.Array, x_BTD: jax.Array) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    return (x * scale_D).astype(x_BTD.dtype)


def rope(x_BTHC: jax.Array) -> jax.Array:
    _, t, _, c = x_BTHC.shape
    angle_TC = jnp.arange(t)[:, None] / 500000.0 ** (jnp.arange(0, c, 2) / c)
    cos, sin = jnp.cos(angle_TC)[:, None], jnp.sin(angle_TC)[:, None]
    a, b = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)


def layer(config: Config, w: Tree, x_BTD: jax.Array) -> jax.Array:
    """Grouped-query attention and SwiGLU, each after a norm and inside a residual."""
    b, t, d = x_BTD.shape
    c, g = config.dim // config.heads, config.kv_heads
    h_BTD = rms_norm(w["attention_norm"], x_BTD)
    # Heads before positions, so that no product of the [T, S] scores needs a transpose of them.
    q_BGQTC = rope((h_BTD @ w["query"]).reshape(b, t, -1, c)).reshape(b, t, g, -1, c).transpose(0, 2, 3, 1, 4)
    k_BGSC = rope((h_BTD @ w["key"]).reshape(b, t, g, c)).transpose(0, 2, 1, 3)
    v_BGSC = (h_BTD @ w["value"]).reshape(b, t, g, c).transpose(0, 2, 1, 3)
    scores = jnp.einsum("bgqtc,bgsc->bgqts", q_BGQTC, k_BGSC) * c**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(x_BTD.dtype)
    a_BTD = jnp.einsum("bgqts,bgsc->bgqtc", weights, v_BGSC).transpose(0, 3, 1, 2, 4).reshape(b, t, d)
    x_BTD = x_BTD + a_BTD @ w["out"]
    h_BTD = rms_norm(w["ffn_norm"], x_BTD)
    return x_BTD + (jax.nn.silu(h_BTD @ w["gate"]) * (h_BTD @ w["up"])) @ w["down"]


def cross_entropy(norm_D: jax.Array, head_DV: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
    logits_BTV = (rms_norm(norm_D, x_BTD) @ head_DV).astype(jnp.float32)
    # A mask, not an index: the gradient of an index is a scatter, which holds two more float32 buffers of this size.
    label = jnp.where(targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1]), logits_BTV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - label).mean()


# The steps. A device's arrays: [V/N, D] of the embedding, [L, D/N, F] of a stack, for N devices on the axis `fsdp`.


def gather(shard: jax.Array) -> jax.Array:
    """The whole bf16 leaf; norms are whole on each device."""
    w = shard.astype(jnp.bfloat16)
    return lax.all_gather(w, "fsdp", axis=0, tiled=True) if w.ndim > 1 else w


def scatter(gradient: jax.Array) -> jax.Array:
    """This device's part of the float32 sum over devices; all of it for norms."""
    g = gradient.astype(jnp.float32)
    return lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True) if g.ndim > 1 else lax.psum(g, "fsdp")


def scatter_in_pieces(gradient: jax.Array, after: jax.Array, pieces: int = 16) -> jax.Array:
    """As `scatter`, once `after` exists, and with only 1/pieces of the gradient in float32 at a time."""
    rows = gradient.reshape(lax.axis_size("fsdp"), pieces, -1, gradient.shape[-1])

    def body(i: jax.Array, parts: jax.Array) -> jax.Array:
        piece = lax.dynamic_index_in_dim(rows, i, axis=1, keepdims=False)
        return lax.dynamic_update_index_in_dim(parts, scatter(piece)[0], i, axis=0)

    return lax.fori_loop(0, pieces, body, zeros_after(after, rows.shape[1:])).reshape(-1, gradient.shape[-1])


def zeros_after(x: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Zeros that cannot exist before `x`: the scheduler fills plain ones long before their use."""
    return jnp.full(shape, (x.reshape(-1)[0] == -jnp.inf).astype(dtype))


def gradients(
    config: Config, fetch: Callable[[jax.Array], jax.Array], params: Tree, shards: Tree, tokens: jax.Array
) -> tuple[jax.Array, Tree]:
    """Global loss, and float32 gradients laid out like `shards`; `fetch` makes a whole bf16 leaf of one of `params`."""
    fetch_all = functools.partial(jax.tree.map, fetch)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    body = functools.partial(layer, config)

    x_BTD = fetch(params["embed"])[inputs]
    x_BTD, stash = lax.scan(lambda x, w: (body(fetch_all(w), x), x), x_BTD, params["layers"])

    weights = fetch_all((params["norm"], params["head"]))
    loss, backward = jax.vjp(lambda w, x: cross_entropy(*w, x, targets) / lax.axis_size("fsdp"), weights, x_BTD)
    (d_norm, d_head), d_x = backward(jnp.ones_like(loss))
    d_head, d_x = lax.optimization_barrier((scatter_in_pieces(d_head, after=d_x), d_x))

    def layer_backward(carry: tuple[jax.Array, Tree], saved: tuple[jax.Array, Tree, jax.Array]) -> tuple[Tree, None]:
        (d_x, d_layers), (i, w, x) = carry, saved
        d_w, d_x = jax.vjp(body, fetch_all(w), x)[1](d_x)
        write = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return (d_x, jax.tree.map(lambda stack, g: write(stack, scatter(g)), d_layers, d_w)), None

    d_layers = jax.tree.map(lambda shard: zeros_after(d_x, shard.shape), shards["layers"])
    layers = jnp.arange(config.layers), params["layers"], stash
    (d_x, d_layers), _ = lax.scan(layer_backward, (d_x, d_layers), layers, reverse=True)

    d_embed = zeros_after(d_x, (config.vocab, config.dim), d_x.dtype).at[inputs].add(d_x)
    d_embed = scatter_in_pieces(d_embed, after=d_embed)
    return lax.psum(loss, "fsdp"), {"embed": d_embed, "layers": d_layers, "norm": scatter(d_norm), "head": d_head}


def gather_over(old: Tree, shards: Tree) -> Tree:
    """The whole bf16 weights; those of the stack are written layer by layer into the old ones' memory."""

    def body(i: jax.Array, stacks: Tree) -> Tree:
        return jax.tree.map(
            lambda s, w: lax.dynamic_update_index_in_dim(s, gather(w[i]), i, 0), stacks, shards["layers"]
        )

    layers = lax.fori_loop(0, len(old["layers"]["query"]), body, old["layers"])
    return {name: layers if name == "layers" else gather(w) for name, w in shards.items()}


def compile_step(
    zero: int, devices: list[jax.Device], config: Config = Config(), options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """The compiled step `(state, tokens) -> (state, loss)`: AdamW, one row a device, state donated.

    state: {"master": float32 params, "moments": optax state}, sharded over devices but for norms; for ZeRO-2 also
    {"params": bf16 copy}, whole on each device. tokens: int32 [devices, T+1], sharded. `options` go to XLA.
    """
    optimizer = optax.adamw(3e-4)

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        fetch, params = (gather, state["master"]) if zero == 3 else (lambda w: w, state["params"])
        loss, grads = gradients(config, fetch, params, state["master"], tokens)
        updates, moments = optimizer.update(grads, state["moments"], state["master"])
        new = {"master": optax.apply_updates(state["master"], updates), "moments": moments}
        return new | ({"params": gather_over(state["params"], new["master"])} if zero == 2 else {}), loss

    master = jax.eval_shape(model_fns(config)[0], jax.random.key(0))
    shapes = {"master": master, "moments": jax.eval_shape(optimizer.init, master)}
    specs = jax.tree.map_with_path(_spec, shapes)
    if zero == 2:
        shapes["params"] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), master)
        specs["params"] = jax.tree.map(lambda _: P(), master)
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=(specs, P()), check_vma=False)
    arguments = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        (shapes, jax.ShapeDtypeStruct((len(devices), config.sequence + 1), jnp.int32)),
        (specs, P("fsdp")),
    )
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    traced = jax.jit(mapped, donate_argnums=0).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def _spec(path: tuple[Any, ...], leaf: Any) -> P:
    """`fsdp` on the first dim that is not the layer, so that whole and part are contiguous; norms are replicated."""
    if leaf.ndim == 0 or "norm" in path[-1].key:
        return P()
    return P(None, "fsdp") if leaf.ndim == 3 else P("fsdp")


def main() -> None:
    from jaxpar.hardware.devices import gpu_topology
    from jaxpar.inspect.ledger import Ledger

    devices = gpu_topology("8xH100")
    for zero in (2, 3):
        start = time.perf_counter()
        compiled = compile_step(zero, devices)
        memory = compiled.memory_analysis()
        print(
            f"zero{zero}: arguments {memory.argument_size_in_bytes / 1e9:.3f} GB, temporaries "
            f"{memory.temp_size_in_bytes / 1e9:.3f} GB, output {memory.output_size_in_bytes / 1e9:.3f} GB (in place "
            f"{memory.alias_size_in_bytes / 1e9:.3f} GB); compiled in {time.perf_counter() - start:.1f} s"
        )
        print(Ledger.from_hlo(compiled.as_text(), jax.sharding.AbstractMesh((len(devices),), ("fsdp",))), end="\n\n")


if __name__ == "__main__":
    main()
