"""The program of a recipe: its training step, and the state that the step reads and writes.

A step is bad if its loss, gradient or a scaling state is not finite, or if its loss jumps. It changes nothing and
clears `healthy` in the state; steps that were already dispatched behind it then change nothing either. If bad steps are
skipped, `healthy` stays, and the next step goes on. A loop may therefore look at a step's metrics one step late.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fp8jax
from experiments import mesh as meshes
from experiments.models.llama import Llama, LlamaConfig
from experiments.models.moe import router_losses
from experiments.train import adapters, parallel, tensor
from experiments.train.adapters import BaseVariable
from experiments.train.experts import AXIS, ExpertSharing
from experiments.train.form import Form
from experiments.train.losses import accumulate, cross_entropy
from experiments.train.released import LAYERS, ReleasedOptimizer, make_layer
from experiments.train.sections import Lora, Optim, Run
from fp8jax.dist import Factors
from fp8jax.optim.bad_steps import init_monitor, loss_limit, observe_step
from fp8jax.optim.clipping import global_norm
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.weight_bounds import find_weight_amax_bounds


class TrainState(NamedTuple):
    """Everything that a step reads and writes, and the content of a checkpoint.

    Attributes:
        step: int32, number of applied updates.
        params: nested dict in the format of working weights.
        model_state: nested dict of further model variables, such as histories of delayed scaling.
        opt_state: state of the optimizer.
        rng: uint32 data of the key for sampling text.
        healthy: bool, False after a bad step that is not skipped.
        factors: state of auto-scaled gradient sums, or empty.
        monitor: a `StepMonitor` with counts of bad steps and recent losses.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    rng: jax.Array
    healthy: jax.Array
    factors: Any = ()
    monitor: Any = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """The program of a recipe: the model's structure and the optimizer, without arrays.

    Attributes:
        llama: the shape.
        tx: the optimizer, clipping included.
        recipe: the recipe; with adapters, its `adapters.base_recipe`.
        remat: rematerialization of blocks, an argument of `Llama`.
        seed: seed of the initial parameters.
        microbatches: number of microbatches of a batch, computed one after the other.
        rows: sharding of sequences over several devices, or None.
        unroll: layers per iteration of the loop over layers, an argument of `Llama`.
        lora: settings of adapters, or None if all weights are trained.
        chunked: whether the loss computes logits in chunks of tokens (`fp8jax.linear_cross_entropy`). It always does
            if the recipe has settings for the head.
        partition: sharding of the optimizer state along "data", an argument of `experiments.mesh.state`.
        balance_coefficient, z_coefficient: coefficients of the router losses.
        expert_capacity: `ExpertSharing.capacity`.
        on_bad_step: "stop", "skip" or "rewind", see `Run`.
        max_loss_jump: an argument of `fp8jax.skip_bad_steps`; 0 for none.
    """

    llama: LlamaConfig
    tx: optax.GradientTransformationExtraArgs | ReleasedOptimizer
    recipe: fp8jax.Recipe
    _: dataclasses.KW_ONLY
    remat: bool | str
    seed: int
    microbatches: int = 1
    rows: jax.sharding.NamedSharding | None = None
    unroll: int | None = None
    lora: Lora | None = None
    chunked: bool = False
    partition: str = ""
    balance_coefficient: float = Optim.balance_coefficient
    z_coefficient: float = Optim.z_coefficient
    expert_capacity: float = Run.expert_capacity
    on_bad_step: str = Run.on_bad_step
    max_loss_jump: float = Run.max_loss_jump

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[Llama]:
        """Returns the structure of the Llama, quantized by the recipe."""
        # Inside shard_map, arrays are local and have no sharding.
        form = dataclasses.replace(self._form, rows=None) if self._is_mapped else self._form
        return form.structure()

    @functools.cached_property
    def device_graphdef(self) -> nnx.GraphDef[Llama]:
        """Returns `graphdef` with the local heads, channels or experts of a device.

        Raises:
            ValueError: the devices along "tensor" cannot share the model's layers (`tensor.check`).
        """
        sizes = {} if self.rows is None else self.rows.mesh.shape
        form = dataclasses.replace(self._form, rows=None)
        if (devices := sizes.get(tensor.AXIS, 1)) > 1:
            return tensor.of_device(form, devices).structure()
        if sizes.get(AXIS, 1) > 1:
            sharing = ExpertSharing(tensor.wire_format(self.recipe), self.expert_capacity)
            return dataclasses.replace(form, sharing=sharing).structure()
        return self.graphdef

    @property
    def _form(self) -> Form:
        return Form(self.llama, self.recipe, self.remat, self.rows, unroll=self.unroll, lora=self.lora)

    @property
    def _is_mapped(self) -> bool:
        """Returns whether loss and gradients are computed inside `jax.shard_map`."""
        return parallel.mapped(self.llama, self.recipe, self.rows)

    @property
    def _takes_chunks(self) -> bool:
        """Returns whether the loss computes logits in chunks of tokens."""
        return self.chunked or self.recipe.head.is_quantized

    def init(self, params: Any = None) -> TrainState:
        """Returns the initial state. Parameters are equal for all recipes. Supports `jax.eval_shape`.

        Args:
            params: parameters to use instead of those of the seed; with adapters, those of the base.
        """
        key = jax.random.key(self.seed)
        model = self._form.build(nnx.Rngs(key), adapters.values_of(params))
        params, _, model_state = map(nnx.to_pure_dict, nnx.state(model, nnx.Param, BaseVariable, ...))
        weights = self.recipe.weights
        stored_params = jax.tree.map(lambda p: p.astype(fp8jax.formats.get(weights.param_format).dtype), params)
        if weights.split_master:
            stored_params, remainder = fp8jax.split_master_weights(params, weights.master)
            opt_state = optax.tree.set(self.tx.init(stored_params), remainder=remainder)
        else:
            opt_state = self.tx.init(params if weights.master == "fp16" else stored_params)
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=stored_params,
            model_state=self._bounded(stored_params, model_state, opt_state)
            if find_weight_amax_bounds(opt_state)
            else model_state,
            opt_state=opt_state,
            rng=jax.random.key_data(jax.random.fold_in(key, 1)),
            healthy=jnp.array(True),
            factors=parallel.factors(self.recipe.comm, params, self.rows and self.rows.mesh),
            monitor=init_monitor(),
        )

    def base(self, params: Any = None) -> Any:
        """Returns the frozen weights for `step`, a nested dict, empty without adapters.

        Args:
            params: parameters of a model of this shape without adapters; None for those of the seed. Codes of a
                `FrozenWeight` are used unchanged.

        Raises:
            UserError: the spec of codes differs from that of the base.
        """
        if self.lora is None:
            return {}
        values = adapters.values_of(params)
        model = self._form.build(nnx.Rngs(jax.random.key(self.seed)), values)
        return adapters.with_codes(nnx.to_pure_dict(nnx.state(model, BaseVariable)), params, self.lora)

    def merged(self, params: Any, base: Any) -> Any:
        """Returns parameters of an equivalent model without adapters, with matrices in fp32."""
        model = nnx.merge(self.graphdef, params, base)
        params_tree = nnx.to_pure_dict(nnx.state(model, BaseVariable))
        for path, w in adapters.merged(model).items():
            *parents, name = path.split("/")
            parent = functools.reduce(lambda tree, step: tree[step], parents, params_tree)
            bias = {"bias": parent[name]["bias"]} if "bias" in parent[name] else {}
            parent[name] = {"kernel": w, **bias}
        return params_tree

    def model(self, params: Any, model_state: Any) -> Llama:
        """Returns the model for evaluation, which does not change its state."""
        model = nnx.merge(self.graphdef, params, model_state)
        model.eval()
        return model

    def loss(self, params: Any, model_state: Any, tokens_BxT: jax.Array) -> jax.Array:
        """Returns the mean next-token cross-entropy, float32, of tokens (B, T + 1), or packed (B, 3, T + 1)."""
        return cross_entropy(self.model(params, model_state), tokens_BxT, self._takes_chunks, head=self.recipe.head)

    def gradients(
        self,
        params: Any,
        model_state: Any,
        tokens_BxT: jax.Array,
        gathered_model: "parallel.GatheredModel | None" = None,
        axes: tuple[str, ...] | None = None,
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        """Returns losses and gradients, as means over the microbatches, and the model state of the next step.

        The gradient is that of "loss", the cross-entropy, plus the losses of routers times their coefficients.

        Args:
            params, model_state, tokens_BxT: see `step`.
            gathered_model: gathers sharded parameters for the time of their use.
            axes: mesh axes over which tokens are sharded; the model state is merged over them. If devices share
                sequences, loss and gradients are a device's part of the mean.
        """
        graphdef = self.graphdef if axes is None else self.device_graphdef
        model = nnx.merge(graphdef, params, model_state)
        model.around = gathered_model
        split_model = model
        if self.microbatches > 1 and self.recipe.linear.is_quantized and gathered_model is None:
            split_model = fp8jax.nnx.quantize_weights(model)
        filters = (nnx.Param, fp8jax.nnx.GradientStatistic, fp8jax.nnx.ScalingVariable, ...)
        graphdef, *states = nnx.split(split_model, *filters)
        weights, slots, scaling_state, other_state = states

        def microbatch_gradients(
            scaling_state: nnx.State, tokens_BxT: jax.Array
        ) -> tuple[nnx.State, tuple[dict[str, jax.Array], Any, Any]]:
            def loss(weights: nnx.State, slots: nnx.State) -> tuple[jax.Array, Any]:
                # Variables can only be set in the trace that created them; these come from an outer trace.
                inner_states = jax.tree.map(lambda x: x, (scaling_state, other_state))
                weights = weights if gathered_model is None else gathered_model.outer_weights(weights)
                model = nnx.merge(graphdef, weights, slots, *inner_states)
                value = cross_entropy(model, tokens_BxT, self._takes_chunks, axes, self.recipe.head)
                routers = router_losses(nnx.state(model))
                total = value
                if routers:
                    total += self.balance_coefficient * routers["balance_loss"] + self.z_coefficient * routers["z_loss"]
                return total, ({"loss": value} | routers, nnx.state(model, fp8jax.nnx.ScalingVariable))

            (_, (losses, new)), (grads, statistics) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
                weights, slots
            )
            return new, (losses, nnx.to_pure_dict(grads), statistics)

        if self.microbatches == 1:
            scaling_state, (losses, grads, statistics) = microbatch_gradients(scaling_state, tokens_BxT)
        else:
            scaling_state, (losses, grads, statistics) = accumulate(
                microbatch_gradients, scaling_state, self._split_microbatches(tokens_BxT)
            )
            grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, params)
        nnx.update(model, scaling_state)
        if any(part.collects_stats for part in self.recipe.linear.stateful_strategies.values()):
            fp8jax.nnx.advance_scaling(model, statistics, axis_name=axes)
        return losses, grads, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def _split_microbatches(self, tokens_BxT: jax.Array) -> jax.Array:
        """Returns the microbatches of a batch, (count, B / count, T), each sharded over all devices."""
        shape = (self.microbatches, len(tokens_BxT) // self.microbatches, *tokens_BxT.shape[1:])
        if self.rows is None or self._is_mapped:
            return tokens_BxT.reshape(shape)
        rows = jax.sharding.NamedSharding(self.rows.mesh, jax.P(None, *self.rows.spec))
        if jax.typeof(tokens_BxT).sharding.mesh.explicit_axes:
            return jnp.reshape(tokens_BxT, shape, out_sharding=rows)
        return jax.lax.with_sharding_constraint(tokens_BxT.reshape(shape), rows)

    def _bounded(self, params: Any, model_state: Any, opt_state: optax.OptState) -> Any:
        """Returns the model state with updated bounds of automatic weight scaling, if the recipe has it."""
        if not self.recipe.linear.needs_weight_bounds:
            return model_state
        model = nnx.merge(self.graphdef, params, model_state)
        fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(opt_state))
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def step(
        self, state: TrainState, tokens_BxT: jax.Array, base: Any = MappingProxyType({})
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Applies an update, except in a bad step, and after it unless bad steps are skipped.

        `base` is the result of the method `base`, if there are adapters. It is not part of the state.

        Metrics are loss, grad_norm and healthy. With experts: balance_loss and z_loss, without their coefficients. With
        auto-scaling: saturated, the number of saturated elements of gradient sums. If bad steps do not stop the run:
        bad_steps and consecutive_bad_steps, and loss_limit, the largest loss that is not a jump.
        """
        if isinstance(self.tx, ReleasedOptimizer):
            return self._released(self.tx, state, tokens_BxT)
        factors = state.factors
        if self.rows is None or not self._is_mapped:
            model_state = adapters.joined(state.model_state, base)
            losses, grads, model_state = self.gradients(state.params, model_state, tokens_BxT)
        else:
            losses, grads, model_state, factors = parallel.gradients(
                self.gradients, self.recipe, self.rows.mesh, state.params, state.model_state, tokens_BxT, factors, base
            )
        grad_norm = global_norm(grads)  # clipping computes it too; XLA merges both
        is_finite = jnp.isfinite(grad_norm)
        for x in jax.tree.leaves((model_state, factors)):
            is_finite &= _all_finite(x)
        healthy, sticky, monitor, counts = self._judged(state, losses["loss"], is_finite)

        def keep_or(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda new, old: jnp.where(healthy, new, old), new, old)

        params = state.params
        if self.partition and self.rows is not None:
            # Each device updates its shards; the caller determines the sharding of new parameters.
            shardings = meshes.optimizer_shardings(self.rows.mesh, params, self.partition)
            if self.partition == "tensors":
                # XLA would reduce-scatter gradients along rows, and then move them to the devices of layers.
                param_shardings = meshes.state(self.rows.mesh, params)
                pick = lambda path, param, optimizer: param if meshes.stacked(path) else optimizer  # noqa: E731
                summed = jax.tree_util.tree_map_with_path(pick, param_shardings, shardings)
                grads = jax.lax.with_sharding_constraint(grads, summed)
            grads, params = jax.lax.with_sharding_constraint((grads, params), (shardings, shardings))
        # Not a branch: XLA would copy the results of both branches.
        if isinstance(self.tx, FusedTransformation):
            params, opt_state = self.tx.step(grads, state.opt_state, params, apply_if=healthy)
        else:
            updates, opt_state = self.tx.update(grads, state.opt_state, params)
            params = keep_or(optax.apply_updates(params, updates), params)
            opt_state = keep_or(opt_state, state.opt_state)
        model_state = adapters.difference(self._bounded(params, model_state, opt_state), base)
        model_state = keep_or(model_state, state.model_state)
        step = state.step + healthy.astype(jnp.int32)
        metrics = losses | {"grad_norm": grad_norm, "healthy": healthy} | counts
        if isinstance(factors, Factors):
            metrics["saturated"] = parallel.saturated(factors, grads)
            factors = keep_or(factors, state.factors)
        return TrainState(step, params, model_state, opt_state, state.rng, sticky, factors, monitor), metrics

    def _judged(
        self, state: TrainState, loss: jax.Array, is_finite: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any, dict[str, jax.Array]]:
        """Returns whether a step is good, the new `healthy` and monitor, and metrics of the decision."""
        jump = self.max_loss_jump or None
        is_good, monitor = observe_step(state.monitor, is_finite & state.healthy, loss, jump)
        metrics = {} if jump is None else {"loss_limit": loss_limit(state.monitor, jump)}
        if self.on_bad_step != "stop":
            metrics |= {"bad_steps": monitor.total, "consecutive_bad_steps": monitor.consecutive}
        return is_good, state.healthy if self.on_bad_step == "skip" else is_good, monitor, metrics

    def _released(
        self, tx: ReleasedOptimizer, state: TrainState, tokens_BxT: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """`step` with layers that are updated inside the backward pass, even if values are not finite."""
        if self.rows is not None and self.rows.mesh.shape[tensor.AXIS] > 1:
            raise ValueError("gradients are summed over the tensor axis after the backward pass; omit --release")
        form = dataclasses.replace(self._form, remat=False)
        parts: Any = nnx.split(nnx.eval_shape(lambda: form.build_plain(nnx.Rngs(0))), nnx.Param, ...)
        graphdef, _, other_state = parts

        def loss(run: Callable[..., jax.Array], outer: Any) -> jax.Array:
            # `run` replaces the model's own layers.
            model = nnx.merge(graphdef, {**outer, LAYERS: state.params[LAYERS]}, other_state)
            model.run = run
            return cross_entropy(model, tokens_BxT, self._takes_chunks, head=self.recipe.head)

        block = make_layer(self.llama, self.recipe, self.remat, self.rows)
        value, params, opt_state = tx.step(block, loss, state.params, state.opt_state)
        healthy, _, monitor, counts = self._judged(state, value, jnp.isfinite(opt_state.norm))
        metrics = {"loss": value, "grad_norm": opt_state.norm, "healthy": healthy} | counts
        step = state.step + healthy.astype(jnp.int32)
        return TrainState(
            step, params, state.model_state, opt_state, state.rng, healthy, state.factors, monitor
        ), metrics


def _all_finite(x: jax.Array) -> jax.Array | bool:
    """Returns whether a floating-point array has no NaN or Inf; True for other arrays."""
    return jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.floating) else True


def exact_task(llama: LlamaConfig, seed: int) -> Task:
    """Returns the task of a Llama with fp32 parameters and arithmetic, without optimizer."""
    optimizer = fp8jax.recipes.Optimizer(mu="fp32", nu="fp32", group_size=None, expand=False)
    recipe = fp8jax.Recipe("fp32", fp8jax.recipes.Weights("fp32", "fp32"), optimizer)
    return Task(llama, optax.with_extra_args_support(optax.identity()), recipe, remat=False, seed=seed, unroll=1)
