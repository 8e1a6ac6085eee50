"""How the parameters of a model are stored under a strategy on a mesh.

`ParamPlacement.make_storage` collects the choices that `make_leaves` (`layout/storage.py`) needs:

    rules, tables, annotations  -->  dims on `tensor` and `expert`  --+-->  make_leaves  -->  Storage
    mesh, schedule              -->  shards and stages  --------------+
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from ..layout.leaves import Pipe, Sharing
from ..layout.storage import Storage, make_leaves
from ..model.model import Model
from ..parallel.expert.dims import apart, expert_dims, looks_stacked
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor.dims import Dims, Rules, tensor_dims
from ..parallel.tensor.pairs import creation_order
from ..strategy import Strategy
from ..strategy.axes import SHARDS
from .checks import Named
from .refusals import check_cut, check_prefetch


@dataclass(frozen=True)
class ParamPlacement:
    """The circumstances on which the storage of parameters depends; `schedule` is the pipeline's."""

    model: Model
    strategy: Strategy
    mesh: Mesh
    schedule: Schedule | None

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes over which ZeRO shards: `fsdp`, other axes with several devices, and with hpZ `data`."""
        axes = tuple(axis for axis in SHARDS if axis == "fsdp" or self.mesh.shape[axis] > 1)
        return axes + ("data",) * self.strategy.hpz

    @property
    def num_shards(self) -> int:
        """The number of devices over which ZeRO shards a leaf; 1 if the strategy has no `fsdp`."""
        return math.prod(self.mesh.shape[axis] for axis in self.shard_axes) if self.strategy.fsdp != 1 else 1

    def make_storage(self, params: Any, shapes: Named, trainable: Any, rules: Rules | None) -> tuple[Storage, Dims]:
        """Choose how the parameters are stored.

        Args:
          params: the abstract parameters, the model's own tree.
          shapes: the path and shape of each of them.
          trainable, rules: as for `make_train_step`.

        Returns:
          The leaves, and the dim of each leaf that `tensor` splits. Raises ValueError if the strategy does not fit the
          model.
        """
        model, strategy, sizes, schedule = self.model, self.strategy, self.mesh.shape, self.schedule
        # 1. The dims that `tensor` and `expert` split, by the user's rules before the model's.
        user_expert_rules, user_rules = apart(rules)
        model_expert_rules, model_rules = apart(model.rules)
        tensor_ranks, experts = sizes["tensor"], sizes["expert"]
        split, expert_split = Dims(), dict[str, int]()
        if tensor_ranks > 1:
            # Tracing the model's creation takes time, and only some models need its order: it is passed as a function.
            creation = functools.partial(creation_order, model.create)
            split = tensor_dims(shapes, tensor_ranks, user_rules, model_rules, model.names(), creation)
        if experts > 1:
            expert_split = expert_dims(shapes, experts, user_expert_rules, model_expert_rules, model.names())

        # 2. The devices that share a leaf.
        is_v = schedule is not None and schedule.placement == "V"
        # Paths or counts of blocks cut the program wherever the user says.
        stages = "cut" if strategy.cuts else str(strategy.stages)
        pipe = Pipe(sizes["pipe"], strategy.chunks, is_v, self.shard_axes, stages)
        sharing = Sharing(self.num_shards, pipe, tensor_ranks, experts)

        # 3. The leaves. A dim of experts, or one that tensor ranks share without a rule, may look like a dim of layers.
        non_layer_dims = looks_stacked(shapes) | expert_split | {path: split[path] for path in split.found}
        storage = make_leaves(params, trainable, sharing, split, expert_split, non_layer_dims)
        if schedule is not None:
            check_prefetch(schedule, strategy, storage.cut)
        if schedule is not None and storage.cut:
            check_cut(schedule, strategy, [path for path, _ in shapes])
        return storage, split
