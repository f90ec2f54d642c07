"""One recipe's program: what a training step does, and the state that it reads and writes.

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
    """Everything that a step reads and writes, and a checkpoint holds.

    step: int32, updates applied. params: nested dict in the format that is held beside the optimizer. model_state:
    nested dict of what the model has besides, such as histories of delayed scaling. opt_state: the optimizer's. rng:
    uint32 data of a key, from which text is sampled. healthy: bool, False once a step was bad and is not skipped.
    factors: state of auto-scaled sums of gradients, or empty. monitor: a `StepMonitor`, counts of bad steps and the
    losses that a jump is measured against.
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
    """One recipe's program: the model's structure and the optimizer, no arrays.

    Attributes:
        llama: the shape.
        tx: the optimizer, clipping included.
        recipe: what everything is stored and computed in; with adapters, `adapters.base_recipe` of it.
        remat: what blocks compute again in the backward pass, as `Llama` takes it.
        seed: of the initial parameters.
        microbatches: parts that a batch is computed in, one after the other.
        rows: how sequences lie on several devices, or None.
        unroll: layers in a turn of the loop over them, as `Llama` takes it.
        lora: adapters, or None where all weights are trained.
        chunked: the loss takes the head's logits a chunk of tokens at a time (`fp8jax.linear_cross_entropy`), as it
            does where the recipe has a head of its own.
        partition: how the devices along "data" share what the optimizer holds, as `experiments.mesh.state` takes it.
        balance_coefficient, z_coefficient: of the losses of routers, which are added to the loss.
        expert_capacity: of devices that share experts, as `ExpertSharing` has it.
        on_bad_step: "stop", "skip" or "rewind", as `Run` has it.
        max_loss_jump: as of `fp8jax.skip_bad_steps`; 0 for none.
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
        """Structure of the Llama, quantized as the recipe says, of parameters and model state."""
        # In shard_map arrays are a device's own, and nothing says how they lie.
        form = dataclasses.replace(self._form, rows=None) if self._is_mapped else self._form
        return form.structure()

    @functools.cached_property
    def device_graphdef(self) -> nnx.GraphDef[Llama]:
        """`graphdef` of a device's heads, channels or experts, where devices share sequences or experts.

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
        """Whether loss and gradients are taken inside `jax.shard_map`."""
        return parallel.mapped(self.llama, self.recipe, self.rows)

    @property
    def _takes_chunks(self) -> bool:
        """Whether the loss computes logits in chunks of tokens."""
        return self.chunked or self.recipe.head.is_quantized

    def init(self, params: Any = None) -> TrainState:
        """The state before the first step, with parameters the same for every recipe; also under `jax.eval_shape`.

        Args:
            params: of a model of this shape, in place of those of the seed; with adapters they are the base's.
        """
        key = jax.random.key(self.seed)
        model = self._form.build(nnx.Rngs(key), adapters.values_of(params))
        params, _, model_state = map(nnx.to_pure_dict, nnx.state(model, nnx.Param, BaseVariable, ...))
        weights = self.recipe.weights
        held = jax.tree.map(lambda p: p.astype(fp8jax.formats.get(weights.param_format).dtype), params)
        if weights.split_master:
            held, remainder = fp8jax.split_master_weights(params, weights.master)
            opt_state = optax.tree.set(self.tx.init(held), remainder=remainder)
        else:
            opt_state = self.tx.init(params if weights.master == "fp16" else held)
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=held,
            model_state=self._bounded(held, model_state, opt_state)
            if find_weight_amax_bounds(opt_state)
            else model_state,
            opt_state=opt_state,
            rng=jax.random.key_data(jax.random.fold_in(key, 1)),
            healthy=jnp.array(True),
            factors=parallel.factors(self.recipe.comm, params, self.rows and self.rows.mesh),
            monitor=init_monitor(),
        )

    def base(self, params: Any = None) -> Any:
        """The frozen weights, a nested dict, empty without adapters: what `step` takes.

        Args:
            params: of a model of this shape without adapters; None uses those of the seed. Of a `FrozenWeight` in it
                the codes are the base's, as they are.

        Raises:
            UserError: codes are of another spec than the base's.
        """
        if self.lora is None:
            return {}
        values = adapters.values_of(params)
        model = self._form.build(nnx.Rngs(jax.random.key(self.seed)), values)
        return adapters.with_codes(nnx.to_pure_dict(nnx.state(model, BaseVariable)), params, self.lora)

    def merged(self, params: Any, base: Any) -> Any:
        """The parameters of a model without adapters that computes what adapters and base do, matrices in fp32."""
        model = nnx.merge(self.graphdef, params, base)
        whole = nnx.to_pure_dict(nnx.state(model, BaseVariable))
        for path, w in adapters.merged(model).items():
            *above, name = path.split("/")
            parent = functools.reduce(lambda tree, step: tree[step], above, whole)
            bias = {"bias": parent[name]["bias"]} if "bias" in parent[name] else {}
            parent[name] = {"kernel": w, **bias}
        return whole

    def model(self, params: Any, model_state: Any) -> Llama:
        """The model for evaluation, which changes no state."""
        model = nnx.merge(self.graphdef, params, model_state)
        model.eval()
        return model

    def loss(self, params: Any, model_state: Any, tokens_BxT: jax.Array) -> jax.Array:
        """Mean cross-entropy of each next token in evaluation, float32; tokens (B, T + 1), or packed (B, 3, T + 1)."""
        return cross_entropy(self.model(params, model_state), tokens_BxT, self._takes_chunks, head=self.recipe.head)

    def gradients(
        self,
        params: Any,
        model_state: Any,
        tokens_BxT: jax.Array,
        whole: "parallel.GatheredModel | None" = None,
        axes: tuple[str, ...] | None = None,
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        """Losses and gradient of the parameters, means over the microbatches, and the model state of the next step.

        The gradient is that of "loss", the cross-entropy, plus the losses of routers times their coefficients.

        Args:
            params, model_state, tokens_BxT: as of `step`.
            whole: where parameters are a device's shards, what makes whole ones for the time of their use.
            axes: where tokens are a device's own, the mesh axes of all; the model state is theirs together. Where
                devices share sequences the loss is a device's part of the mean, and so are gradients.
        """
        graphdef = self.graphdef if axes is None else self.device_graphdef
        model = nnx.merge(graphdef, params, model_state)
        model.around = whole
        held = model
        if self.microbatches > 1 and self.recipe.linear.is_quantized and whole is None:
            held = fp8jax.nnx.quantize_weights(model)
        filters = (nnx.Param, fp8jax.nnx.GradientStatistic, fp8jax.nnx.ScalingVariable, ...)
        graphdef, *states = nnx.split(held, *filters)
        weights, slots, scaling_state, other_state = states

        def one(
            scaling_state: nnx.State, tokens_BxT: jax.Array
        ) -> tuple[nnx.State, tuple[dict[str, jax.Array], Any, Any]]:
            def loss(weights: nnx.State, slots: nnx.State) -> tuple[jax.Array, Any]:
                # Variables belong to the trace that made them: these come from the one around.
                own = jax.tree.map(lambda x: x, (scaling_state, other_state))
                weights = weights if whole is None else whole.outer_weights(weights)
                model = nnx.merge(graphdef, weights, slots, *own)
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
            scaling_state, (losses, grads, statistics) = one(scaling_state, tokens_BxT)
        else:
            scaling_state, (losses, grads, statistics) = accumulate(one, scaling_state, self._parts(tokens_BxT))
            grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, params)
        nnx.update(model, scaling_state)
        if any(part.collects_stats for part in self.recipe.linear.stateful_strategies.values()):
            fp8jax.nnx.advance_scaling(model, statistics, axis_name=axes)
        return losses, grads, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def _parts(self, tokens_BxT: jax.Array) -> jax.Array:
        """The microbatches of a batch, (count, B / count, T), each spread over all devices."""
        shape = (self.microbatches, len(tokens_BxT) // self.microbatches, *tokens_BxT.shape[1:])
        if self.rows is None or self._is_mapped:
            return tokens_BxT.reshape(shape)
        rows = jax.sharding.NamedSharding(self.rows.mesh, jax.P(None, *self.rows.spec))
        if jax.typeof(tokens_BxT).sharding.mesh.explicit_axes:
            return jnp.reshape(tokens_BxT, shape, out_sharding=rows)
        return jax.lax.with_sharding_constraint(tokens_BxT.reshape(shape), rows)

    def _bounded(self, params: Any, model_state: Any, opt_state: optax.OptState) -> Any:
        """The model state with the bounds of automatic weight scaling after an update, where the recipe has it."""
        if not self.recipe.linear.needs_weight_bounds:
            return model_state
        model = nnx.merge(self.graphdef, params, model_state)
        fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(opt_state))
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def step(
        self, state: TrainState, tokens_BxT: jax.Array, base: Any = MappingProxyType({})
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; none in a bad step, nor after it unless bad steps are skipped.

        `base` is what the method of this name gives, where there are adapters; none of it is in the state.

        Metrics are loss, grad_norm and healthy; with experts balance_loss and z_loss, without their coefficients; and,
        where sums of gradients have factors, saturated: how many elements of these sums lay at the end of the range.
        If bad steps do not stop the run, bad_steps and consecutive_bad_steps count them; loss_limit is the largest loss
        that is no jump, if one is looked for.
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
        grad_norm = global_norm(grads)  # that which clipping finds: XLA computes it once
        is_finite = jnp.isfinite(grad_norm)
        for x in jax.tree.leaves((model_state, factors)):
            is_finite &= _all_finite(x)
        healthy, sticky, monitor, counts = self._judged(state, losses["loss"], is_finite)

        def keep_or(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda new, old: jnp.where(healthy, new, old), new, old)

        params = state.params
        if self.partition and self.rows is not None:
            # Each device updates what it holds; where parameters lie after a step says its caller.
            where = meshes.optimizer_shardings(self.rows.mesh, params, self.partition)
            if self.partition == "tensors":
                # XLA would scatter sums of layers' gradients along rows, and then move that to the layers' devices.
                whole = meshes.state(self.rows.mesh, params)
                pick = lambda path, one, own: one if meshes.stacked(path) else own  # noqa: E731
                summed = jax.tree_util.tree_map_with_path(pick, whole, where)
                grads = jax.lax.with_sharding_constraint(grads, summed)
            grads, params = jax.lax.with_sharding_constraint((grads, params), (where, where))
        # No branch: its two ends would be copied to one place.
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
        """Whether a step is good, `healthy` and the monitor after it, and metrics of what decided."""
        jump = self.max_loss_jump or None
        is_good, monitor = observe_step(state.monitor, is_finite & state.healthy, loss, jump)
        metrics = {} if jump is None else {"loss_limit": loss_limit(state.monitor, jump)}
        if self.on_bad_step != "stop":
            metrics |= {"bad_steps": monitor.total, "consecutive_bad_steps": monitor.consecutive}
        return is_good, state.healthy if self.on_bad_step == "skip" else is_good, monitor, metrics

    def _released(
        self, tx: ReleasedOptimizer, state: TrainState, tokens_BxT: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """`step` with layers that are updated inside the backward pass, whether all is finite or not."""
        if self.rows is not None and self.rows.mesh.shape[tensor.AXIS] > 1:
            raise ValueError("gradients are summed over the tensor axis after the backward pass; omit --release")
        form = dataclasses.replace(self._form, remat=False)
        parts: Any = nnx.split(nnx.eval_shape(lambda: form.build_plain(nnx.Rngs(0))), nnx.Param, ...)
        graphdef, _, others = parts

        def loss(run: Callable[..., jax.Array], outer: Any) -> jax.Array:
            # The model's own layers are not called.
            model = nnx.merge(graphdef, {**outer, LAYERS: state.params[LAYERS]}, others)
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
    """Whether an array of floats has no NaN or Inf; True for other arrays."""
    return jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.floating) else True


def exact_task(llama: LlamaConfig, seed: int) -> Task:
    """A Llama with parameters and arithmetic in fp32, and no optimizer."""
    plain = fp8jax.recipes.Optimizer(mu="fp32", nu="fp32", group_size=None, expand=False)
    recipe = fp8jax.Recipe("fp32", fp8jax.recipes.Weights("fp32", "fp32"), plain)
    return Task(llama, optax.with_extra_args_support(optax.identity()), recipe, remat=False, seed=seed, unroll=1)
