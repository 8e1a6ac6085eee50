"""Llama-3-8B in four axes, compiled for 64 H100s that are not there: traffic, memory, and what is never whole.

Megatron-LM's traffic (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2) is counted here by hand
from the sizes of the model, and not read from the program.
"""

import functools
import re

import optax
import pytest
from cells import Compiled

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.expected import expected
from jaxpar.models import named

pytestmark = pytest.mark.cuda_compiler
PIPE, FSDP, TENSOR, MICROBATCHES, LENGTH = 4, 8, 2, 16, 8192
LLAMA = named("llama3-8b")
CONFIG = LLAMA.config
STREAM = LENGTH * CONFIG.dim * 2  # bytes of the residual stream of one row in bfloat16
TICKS = MICROBATCHES + PIPE - 1  # of forwards, and of backwards
RUNS = TICKS * CONFIG.layers // PIPE  # of a layer on one rank, forwards
SMALL = 1 << 20


class Traffic(Compiled):
    def over(self, *axes: str) -> dict[str, tuple[int, int]]:
        """Return count and bytes of each kind of collective over these axes that moves a megabyte at once."""
        large = [row for row in self.ledger if row.axes == axes and row.bytes > SMALL * (row.count or 1)]
        kinds = {row.kind for row in large}
        sums = {kind: [(row.count, row.bytes) for row in large if row.kind == kind] for kind in kinds}
        return {kind: (sum(c or 0 for c, _ in pairs), sum(b for _, b in pairs)) for kind, pairs in sums.items()}


@functools.cache
def compiled(sequence: bool) -> Traffic:
    text = f"tensor={TENSOR},sequence={sequence},fsdp={FSDP},pipe={PIPE},microbatches={MICROBATCHES}"
    step = jp.make_train_step(
        LLAMA.model, optax.adamw(3e-4), f"{text},precision=bf16,remat=layer", gpu_topology("64xH100")
    )
    return Traffic.of(step, LLAMA.example(FSDP * MICROBATCHES, LENGTH))


SEQUENCE = [
    pytest.param(s, marks=pytest.mark.xdist_group(f"gpu tensor {s}"), id=f"sequence={s}") for s in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize("sequence", SEQUENCE)
def test_activations_are_sent_as_in_megatron(sequence: bool) -> None:
    traffic = compiled(sequence).over("tensor")
    # Forwards in a layer: after attention and after the feed-forward. Recomputed: the first of them. Backwards: before
    # each. Beside the layers: forwards of the embedding, in every tick if the first carries of all microbatches take
    # more memory than the embedding; and backwards of the head, which the last rank's rows need.
    layers, ends = RUNS * (2 + 1 + 2), (MICROBATCHES if sequence else TICKS) + MICROBATCHES
    if not sequence:
        assert traffic == {"all-reduce": (layers + ends, (layers + ends) * STREAM)}
        return
    # In ticks without a backward, a layer's two scatters and the products before them run in two parts. Gathers stay
    # whole: with two ranks, joining the products' results would take longer than the overlap saves.
    parts = 2 * (PIPE - 1) * CONFIG.layers // PIPE
    # A reduce-scatter for each of these. All-gathers: before attention and feed-forward, again when they are
    # recomputed, whereby the weights' gradients have their inputs, and of their outputs' cotangents; of the head's
    # input, and of the embedding's cotangent. An all-gather's buffer is the whole, as is a reduce-scatter's.
    assert traffic["reduce-scatter"] == (layers + ends + parts, (layers + ends) * STREAM)
    # Two of a layer's six are there at once, and XLA makes one of them.
    assert traffic["all-gather"] == (RUNS * 5 + ends, (RUNS * 6 + ends) * STREAM)
    assert set(traffic) == {"reduce-scatter", "all-gather"}


@pytest.mark.parametrize("sequence", SEQUENCE)
def test_weights_and_gradients_move_their_part(sequence: bool) -> None:
    """All-gathers of weights and reduce-scatters of gradients move 1/tensor of the bytes, and norms all of theirs."""
    c = CONFIG
    kernels = c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.dim * c.ffn
    layer = kernels // TENSOR + 2 * c.dim
    traffic = compiled(sequence).over("fsdp")
    assert traffic["all-gather"][1] == pytest.approx(2 * RUNS * 2 * layer, rel=1e-3)  # forwards and backwards, bfloat16
    assert traffic["reduce-scatter"][1] == pytest.approx(RUNS * 4 * layer, rel=1e-3)  # float32
    assert set(traffic) == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("sequence", SEQUENCE)
def test_no_other_collective_is_large(sequence: bool) -> None:
    step = compiled(sequence)
    table = CONFIG.vocab * CONFIG.dim // TENSOR  # the embedding or the head
    ends = step.over("pipe", "fsdp")
    # Both once a step, whatever the microbatches; with what is combined with them: the last norm's scale.
    assert ends["all-gather"][1] == pytest.approx(2 * 2 * table, rel=1e-4)
    assert ends["reduce-scatter"][1] == pytest.approx(2 * 4 * table, rel=1e-4)
    part = STREAM // TENSOR if sequence else STREAM
    assert step.over("pipe") == {"collective-permute": (2 * TICKS, 2 * TICKS * part)}
    expected_axes = {("tensor",), ("fsdp",), ("pipe", "fsdp"), ("pipe",)}
    assert {row.axes for row in step.ledger if row.bytes > SMALL * (row.count or 1)} == expected_axes
    # The closed form lists all of them, except for the optimizer's norms of a few bytes.
    actual, closed_form = step.ledger.by("kind", "axes"), expected(step.step, step.batch).by("kind", "axes")
    assert {k: v for k, v in actual.items() if v > 100} == {k: v for k, v in closed_form.items() if v > 100}


@pytest.mark.parametrize("sequence", SEQUENCE)
def test_memory_is_that_of_stash_weights_and_gradients(sequence: bool) -> None:
    """Memory peaks when a microbatch gives the head's gradient. Cotangents of logits take the memory of the logits."""
    step, c = compiled(sequence), CONFIG
    params = step.step.layout.bytes["params"] // 4  # this device's share
    layers = c.layers // PIPE
    local_stream = STREAM // TENSOR if sequence else STREAM
    slots = 2 * PIPE - 1
    words = LENGTH * c.vocab // TENSOR
    terms = {
        "float32 parameters and two moments": 3 * 4 * params,
        "parameters in bfloat16": 2 * params,
        "gradients in float32": 4 * params,
        "the inputs of layers, stashed": slots * layers * local_stream,
        "cotangents of logits in bfloat16": 2 * words,
        "the head's gradient by them in bfloat16": 2 * c.vocab * c.dim // TENSOR,
        "embedding and head, gathered": 2 * 2 * c.vocab * c.dim // TENSOR,
        "their gradients, whole": 2 * 4 * c.vocab * c.dim // TENSOR,
    }
    peak = step.memory.argument_size_in_bytes + step.memory.temp_size_in_bytes
    assert peak == pytest.approx(sum(terms.values()), rel=0.03)


@pytest.mark.parametrize("sequence", SEQUENCE)
def test_logits_are_never_whole(sequence: bool) -> None:
    shapes = set(re.findall(r"\b(\w+)\[([\d,]+)\]", compiled(sequence).text))
    dims = {dtype: {int(n) for d, shape in shapes if d == dtype for n in shape.split(",")} for dtype, _ in shapes}
    assert CONFIG.vocab // TENSOR in dims["f32"]
    assert all(CONFIG.vocab not in sizes for sizes in dims.values())


@pytest.mark.xdist_group("gpu tensor False")
def test_attention_is_cudnns() -> None:
    assert "__cudnn$fmhaSoftmax" in compiled(False).text


@pytest.mark.parametrize("shuffled", [False, True])
def test_tensor_ranks_share_a_host(shuffled: bool) -> None:
    devices = gpu_topology("64xH100")
    devices = devices[1::2] + devices[::2] if shuffled else devices
    step = jp.make_train_step(LLAMA.model, optax.sgd(0.1), "tensor=4,fsdp=2,data=2,pipe=4,microbatches=4", devices)
    hosts = [{d.process_index for d in rank.flat} for rank in step.mesh.devices.reshape(-1, 8)]
    assert all(len(host) == 1 for host in hosts)  # 2 x 4, fsdp x tensor, fill one
    stages = [{d.process_index for d in stage.flat} for stage in step.mesh.devices]
    assert not any(a & b for i, a in enumerate(stages) for b in stages[:i])


def test_tensor_across_hosts_warns() -> None:
    with pytest.warns(UserWarning, match=r"tensor=16 does not divide the 8 devices of a host.*use tensor=8"):
        jp.make_train_step(LLAMA.model, optax.sgd(0.1), "tensor=16,data=4", gpu_topology("64xH100"))
