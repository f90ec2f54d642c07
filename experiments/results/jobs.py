"""The files of results/CARD/ with their commands, in order of importance.

`experiments.results` runs the jobs of one, two, four and eight GPUs, and the papers' tables, which need no GPU. With a
text, it runs `TRAINED`, which takes hours.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Job:
    """A results file and its command.

    Attributes:
        name: name of the file.
        command: module and options. It also has an option for the folder of results.
        seconds: duration on an H100, or on a CPU.
        gpus: number of GPUs; 0 for none.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 1

    @property
    def argv(self) -> list[str]:
        """The command line for this Python."""
        return [sys.executable, "-m", *self.command]

    def reading(self, text: Sequence[str]) -> "Job":
        """Returns the same job with training text."""
        return dataclasses.replace(self, command=(*self.command[:-1], "--data", *text, self.command[-1]))


def bench(name: str, seconds: float, *options: str, file: str | None = None, gpus: int = 1) -> Job:
    """Returns a job of `experiments.bench` that writes FILE.json, by default NAME.json."""
    named = ("--name", file) if file else ()
    return Job(file or name, ("experiments.bench", name, *options, *named, "--out"), seconds, gpus)


def table(name: str, seconds: float, gpus: int = 0) -> Job:
    """Returns a job of `experiments.papers`."""
    return Job(name, (f"experiments.papers.{name}", "--results"), seconds, gpus)


# An arm takes 20 to 80 s to trace and compile.
# In order of importance. Seconds were measured on an H100, or are generous estimates.
STEP = ("--mesh", "one", "--rounds", "3", "--steps", "4")
ONE_GPU = (
    bench("step", 220, *STEP, "--torch", "torch bf16", "--arm", "bf16", "te_current", "coat", "coat_fast", "moss",
          "fast"),
    bench("models", 480, "--models", "llama1b", "--rounds", "3", "--torch", "torch bf16", "torchao tensorwise", "--arm",
          "bf16", "coat_fast"),
    bench("models", 390, "--models", "llama1b", "--rounds", "3", "--arm", "bf16", "te_current", "coat", "coat_fast",
          "coat_fast, 8-bit head", "prequantized:coat_fast", file="models_more"),
    # torch.compile takes four minutes for it.
    bench("models", 350, "--models", "llama1b", "--rounds", "2", "--torch", "torchao rowwise", "--arm", "bf16",
          "coat_fast", file="models_rowwise"),
    *(bench("models", seconds, "--models", name, "--rounds", "3", file=f"models_{name}")
      for name, seconds in (("vitl", 170), ("vitl_cudnn", 150), ("gpt350m", 110), ("gpt124m", 90),
                            ("llama1b_dots", 200), ("llama1b_linen", 130), ("llama1b_equinox", 175))),
    bench("models", 100, "--models", "gpt8x256", "gpt8x512", "gpt8x1024", "--rounds", "3", file="models_small"),
    bench("models", 360, "--models", "llama1b", "--rounds", "3", "--arm", "bf16", "coat", "observed:coat",
          file="telemetry"),
    bench("release", 110, "--rounds", "2"),
    bench("release", 240, "--batch", "0", "--rounds", "2", "--arm", "coat_optimizer, released, bf16+int8 masters",
          "coat, released, bf16+int8 masters", "bf16, released, bf16+int8 masters", file="release_most"),
    bench("release", 150, "--length", "4096", "--rounds", "2", "--arm", "coat, released, bf16+int8 masters",
          "fast, released, bf16+int8 masters", file="release_4096"),
    bench("release", 150, "--model", "8b", "--length", "8192", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", "fast, released, bf16+int8 masters", file="release_8b"),
    bench("release", 120, "--fit", "40", "--batch", "0", "--rounds", "2", "--arm", "coat, released, bf16+int8 masters",
          file="release_40"),
    bench("release", 120, "--batch", "16", "--rounds", "2", "--steps", "2", "--arm",
          "coat, released, bf16+int8 masters", "coat, released, offloaded, bf16+int8 masters", file="release_offload"),
    bench("layer", 110, "--lengths", "4096"),
    bench("moe", 250),
    bench("profile", 170, "--only", "coat", "coat_fast", file="profile_models"),
    bench("profile", 250, "--models", "vitl", "gpt350m", "gpt124m", "--only", "coat_fast", file="profile_more"),
    bench("optimizer", 110),
    bench("gemm", 125, "--limit", "100"),
    table("coat_speed", 40, gpus=1),
    bench("peers", 160),
    bench("grouped", 260),
    bench("step", 265, *STEP, "--torch", "--arm", "fp8_lm", "moss_mx", "int8_fallback",
          "te_current, none of our kernels", file="step_more"),
    bench("step", 125, *STEP, "--vocab", "128256", "--torch", "--arm", "bf16, whole logits", "bf16", "coat",
          "coat_fast", "coat, 8-bit head", "coat_fast, 8-bit head", file="step_vocab"),
    bench("quantize", 65),
    bench("gemm_int8", 65, "--limit", "55", "--shapes", "4"),
    bench("linear", 50),
    bench("step", 90, *STEP, "--torch", "--arm", "moss", "moss, weights just in time", "moss, weights delayed",
          file="step_scaling"),
    bench("lora", 45, "--arm", "te_current on e4m3", "fast on e4m3"),
)  # fmt: skip
TWO_GPUS = (
    bench("step", 240, "--mesh", "data", "fsdp", "--rounds", "3", "--torch", "--arm", "coat", "fast",
          "coat, 8-bit gradients, one phase", file="step_two", gpus=2),
    bench("step", 300, "--mesh", "tensor", "--rounds", "3", "--torch", "--arm", "coat", "coat_fast", "fast",
          file="step_tensor", gpus=2),
    bench("models", 150, "--models", "llama1b", "--gpus", "2", "--rounds", "3", "--arm", "bf16", "coat_fast",
          file="models_two", gpus=2),
    bench("profile", 120, "--gpus", "2", "--only", "coat_fast", file="profile_two", gpus=2),
    bench("moe", 120, "--gpus", "2", file="moe_two", gpus=2),
    bench("reduce", 120, gpus=2),
    bench("step", 200, "--model", "7b", "--mesh", "fsdp", "--batch", "4", "--rounds", "3", "--torch", "--arm", "coat",
          "fp8_lm", "fp8_lm_two_phase", file="step_7b", gpus=2),
    bench("step", 260, "--model", "7b", "--mesh", "fsdp", "--fit", "80", "--rounds", "3", "--torch", "--arm", "coat",
          "coat_optimizer", file="step_7b_fit", gpus=2),
    bench("release", 240, "--model", "13b", "--gpus", "2", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", "coat, bf16+int8 masters", file="release_13b", gpus=2),
    bench("release", 240, "--gpus", "2", "--length", "4096", "--batch", "0", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", file="release_two", gpus=2),
    bench("release", 240, "--model", "8b", "--gpus", "2", "--length", "8192", "--batch", "0", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", file="release_two_8b", gpus=2),
)  # fmt: skip


def wide(count: int, word: str) -> tuple[Job, ...]:
    """Returns the jobs that use all GPUs of a host with four or eight."""
    step = functools.partial(bench, "step", gpus=count)
    return (
        step(180, "--mesh", "data", "fsdp", f"fsdp={count // 2},tensor=2", "--rounds", "3", "--torch", "--arm", "coat",
             file=f"step_{word}"),
        step(150, "--model", "7b", "--mesh", "fsdp", "--fit", "80", "--rounds", "3", "--torch", "--arm", "coat",
             file=f"step_7b_fit_{word}"),
        step(150, "--mesh", "data", "--rounds", "3", "--torch", "--arm", "coat", "coat, 8-bit gradients, one phase",
             "fp8_lm", file=f"step_gradients_{word}"),
        step(200, "--model", "7b", "--mesh", "fsdp", "--batch", "4", "--rounds", "3", "--torch", "--arm", "coat",
             "fp8_lm", file=f"step_7b_{word}"),
        step(240, "--model", "13b", "--mesh", "fsdp", "--fit", "76", "--rounds", "2", "--torch", "--arm", "coat",
             file=f"step_13b_{word}"),
        bench("release", 240, "--model", "13b", "--gpus", str(count), "--batch", "0", "--rounds", "2", "--arm",
              "coat, released, bf16+int8 masters", file=f"release_13b_{word}", gpus=count),
        bench("release", 240, "--gpus", str(count), "--length", "4096", "--batch", "0", "--rounds", "2", "--arm",
              "coat, released, bf16+int8 masters", file=f"release_{word}", gpus=count),
        bench("reduce", 120, file=f"reduce_{word}", gpus=count),
    )  # fmt: skip


FOUR_GPUS = (
    *wide(4, "four"),
    Job("fp8_lm_reductions_gpus", ("experiments.papers.fp8_lm_reductions", "--results"), 90, gpus=4),
)
EIGHT_GPUS = wide(8, "eight")
CPU = (
    table("plans", 60),
    table("coat_memory", 60),
    table("int8_memory", 60),
    table("coat_optimizer", 400),
    table("coat_activations", 200),
    table("fp8_lm_gradients", 200),
    table("fp8_lm_reductions", 200),
    Job("soak", ("experiments.soak", "--results"), 1800, gpus=0),
)
# Finished studies. Their files stay; their commands exist at the commits in the files.
SETTLED = (
    "coat_expansion",
    "finetuning",
    "finetuning_60m",
    "fp8_lm_masters",
    "int8_diverges",
    "int8_fallback",
    "int8_leak",
    "int8_limit",
    "int8_outliers",
    "int8_speed",
    "moss_accuracy",
    "moss_scaling",
    "moss_snr",
    "profile",
    "release_clipping",
    "scaling",
    "second_moment",
    "training_parity",
)
# Tables of other files, without measurements. They run last.
DERIVED = (
    *(Job(page, ("experiments.papers.parity", "--study", name, "--judge", "--results"), 5, gpus=0)
      for name, page in (("recipes", "recipe_parity"), ("intervals", "recipe_parity_intervals"),
                         ("block_scaled", "recipe_parity_block_scaled"),
                         ("block_scaled_medium", "recipe_parity_block_scaled_medium"),
                         ("experts", "recipe_parity_experts"), ("head", "recipe_parity_head"),
                         ("fixed_batch", "fixed_batch"))),
    *(Job(f"recipe_errors_{size}",
          ("experiments.papers.recipe_errors", "--size", size, "--presets", "--results"), 5, gpus=0)
      for size in ("13m", "small")),
)  # fmt: skip


def seeds(study: str, seconds: float, arms: Sequence[str], gpus: int = 1) -> tuple[Job, ...]:
    """Returns jobs that train the missing seeds of a study, one per arm. They can run in parallel."""
    return tuple(
        Job(f"parity_{study}_{arm.replace(', ', '_').replace(' ', '_')}",
            ("experiments.papers.parity", "--study", study, "--arms", arm, "--results"), seconds, gpus)
        for arm in arms
    )  # fmt: skip


# Studies that train on a text of 150 MB or more. Seconds are for an H100 shared by two jobs. `DERIVED` has their pages.
TRAINED = (
    *seeds("recipes", 500, ("bf16", "coat_fast")),  # ten seeds
    *seeds("recipes", 300, ("fp8_lm",), gpus=2),
    *seeds("recipes", 300, ("coat", "fast", "int8_fallback", "control_one_bit", "coat, fast accumulation",
                            "coat_fast, fast dgrad", "coat_fp8_head", "released_by_shares")),
    *seeds("intervals", 150, ("bf16", "moss_interval_1", "moss_interval_100", "moss", "moss_interval_2000")),
    *seeds("block_scaled", 100, ("bf16", "mxfp8", "nvfp4", "coat", "mxfp8, rounded down", "nvfp4, no rotation",
                                 "nvfp4, nearest", "nvfp4, 1x16 weights", "nvfp4, all blocks", "nvfp4, no part")),
    *seeds("block_scaled_medium", 200, ("bf16", "mxfp8", "nvfp4", "coat")),
    *seeds("head", 100, ("bf16", "coat_fast", "coat_fast, 8-bit head")),
    *seeds("experts", 150, ("bf16", "coat", "coat_fast", "deepseek", "int8_fallback")),
    Job("parity_recipe_errors_13m", ("experiments.papers.recipe_errors", "--size", "13m", "--results"), 600),
    *seeds("long", 4000, ("bf16", "moss", "fast")),
    Job("fp8_lm_precision_125m", ("experiments.papers.fp8_lm_precision", "--model", "125m", "--results"), 3000),
)  # fmt: skip
