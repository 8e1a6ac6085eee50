"""Experts on devices of their own: Lepikhin et al. 2021, GShard, section 3.2; Roller et al. 2021, Hash Layers.

The feed-forward's F features are X = N experts of F/N, and a token goes to the one that its id names, with no router.
Every device has B/N rows and one expert. An all-to-all brings tokens there, in S = B/N T slots for each two devices, so
that none is dropped, and another one back. Dims are those of model.py. jaxpar (parallel/expert/,
parallel/expert/ops/) has slots for 1.25 times the mean load, and rounds for what overflows them.

    memory per device    parameters, gradients, momentum: 1/N of experts', all of others; N S slots
    sent per step        2 all-to-alls of N S D a layer forwards, 2 backwards; all-reduce of what is no expert's
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import B, D, F, N, T, Tree, attention, embed, head_loss, norm, sgd

S = B // N * T
mesh = jax.sharding.Mesh(jax.devices(), ("expert",))
EXPERTS = {"up": P(None, None, "expert"), "down": P(None, "expert")}
SHARED = ("query", "key", "value", "out", "norm_attention", "norm_ffn")
SPECS = {"outer": P(), "layers": EXPERTS | dict.fromkeys(SHARED, P())}
start = lambda params: place(params, mesh, SPECS)


def run(params: Tree, tokens: jax.Array, mixture: object) -> jax.Array:
    def layer(x_BTD: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x_BTD = x_BTD + attention(norm(x_BTD, w["norm_attention"]), w)
        return x_BTD + mixture(norm(x_BTD, w["norm_ffn"]), w, tokens[:, :-1] % N), None

    x_BTD, _ = lax.scan(layer, embed(params["outer"], tokens), params["layers"])
    return head_loss(params["outer"], x_BTD, tokens)


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    own = lambda expert_BT: jnp.repeat(jax.nn.one_hot(expert_BT, N), F // N, axis=-1)
    return run(params, tokens, lambda x, w, expert: (jax.nn.gelu(x @ w["up"]) * own(expert)) @ w["down"])


def exchanged(x_BTD: jax.Array, w: Tree, expert_BT: jax.Array) -> jax.Array:
    there = jax.nn.one_hot(expert_BT.reshape(S), N, dtype=jnp.int32)
    place = expert_BT.reshape(S), (there.cumsum(0) * there).sum(1) - 1  # its expert, and how many went there before
    slots_XSD = jnp.zeros((N, S, D)).at[place].set(x_BTD.reshape(S, D))
    slots_XSD = lax.all_to_all(slots_XSD, "expert", 0, 0)  # for all experts -> from all devices
    slots_XSD = lax.all_to_all(jax.nn.gelu(slots_XSD @ w["up"]) @ w["down"], "expert", 0, 0)
    return slots_XSD[place].reshape(x_BTD.shape)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P("expert")), out_specs=(P("expert"), SPECS, SPECS), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    value, grads = jax.value_and_grad(lambda params: run(params, tokens, exchanged) / N)(params)
    vector, unravel = ravel_pytree((grads["outer"], {name: grads["layers"][name] for name in SHARED}))
    outer, shared = unravel(lax.psum(vector, "expert"))
    return value[None], *sgd(params, momentum, {"outer": outer, "layers": grads["layers"] | shared})


if __name__ == "__main__":
    main(start, step, loss=loss)
