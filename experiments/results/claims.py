"""What RESULTS.md and README.md say in one line each, looked up in results/*.json. Nothing here is a figure of ours."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.results.lookup import (
    AGAIN,
    BOUNDED,
    COSINES,
    CRITERIA,
    DATA,
    FIT_7B,
    FOUR,
    FP32,
    FSDP,
    FSDP_7B,
    HALVES,
    MEANS,
    MOST,
    MOST_EACH,
    ONE,
    OURS,
    PARTS,
    PEER_OURS,
    PEER_STREAMS,
    PEERS,
    PERPLEXITY,
    SUSTAINED,
    USERS,
    Result,
    above,
    against_22,
    beside,
    difference,
    error,
    exchanged,
    find,
    of_ideal,
    quotient,
    ratio,
    several,
    signal,
    span,
    value,
)


class Claim(NamedTuple):
    """A row of RESULTS.md.

    Attributes:
        text: what is measured, against what.
        bench: name of the results file.
        ours: our figure, from the file; None where the file lacks the rows.
        paper: the paper's figure and where it stands.
        peer: others' figure of the same run, from the file; "" where there is none.
    """

    text: str
    bench: str
    ours: Callable[[Result], str | None]
    paper: str = ""
    peer: Callable[[Result], str | None] = lambda _: ""


CLAIMS: list[Claim] = [
    Claim("A training step of a 1.1 B Llama, `coat_fast`: speed over bf16 that recomputes element-wise operations",
          "step", ratio("coat_fast", "step", AGAIN, ONE), "1.36 to 1.85, at largest batches (COAT, Table 8, 7B)",
          beside("te_current", ratio("te_current", "step", AGAIN, ONE))),
    Claim("The same step, `moss`: MOSS's scales, folded into rows, so that products have one fp32 scale a row; "
          "automatic weight scaling, bf16 contexts", "step",
          ratio("moss", "step", AGAIN, ONE), "1.34, over its own bf16 (MOSS, Table 2, 7B)"),
    Claim("The same step, `moss_mx`: MOSS's products as published, powers of two applied in registers", "step_more",
          ratio("moss_mx", "step", AGAIN, ONE), "1.34"),
    Claim("The same step, `fast`: MOSS's scales, folded into rows, with COAT's contexts and optimizer", "step",
          ratio("fast", "step", AGAIN, ONE)),
    Claim("The same step, `coat`", "step", ratio("coat", "step", AGAIN, ONE), "1.36 to 1.85",
          beside("torch.compile's bf16", ratio("torch bf16", "step", AGAIN, ONE))),
    Claim("The same step in bf16 that recomputes nothing, by XLA; it keeps more bytes", "step",
          ratio("bf16", "step", AGAIN, ONE), "", beside("memory", ratio("bf16", "memory", AGAIN, ONE))),
    Claim("The same step, `fp8_lm`, on one GPU, where nothing is reduced", "step_more",
          ratio("fp8_lm", "step", AGAIN, ONE),
          "1.38 to 1.53 (FP8-LM, 7B and 13B, at larger batches; 1.75 is its 175B's)"),
    Claim("The same step in int8, `int8_fallback`", "step_more", ratio("int8_fallback", "step", AGAIN, ONE),
          "1.57 (RTX 4090, Table 2)"),
    Claim("The same step with none of our kernels: `te_current`", "step_more",
          ratio("te_current, none of our kernels", "step", AGAIN, ONE)),
    Claim("The same step with a vocabulary of 128,256 entries: `coat`, `coat_fast`", "step_vocab",
          several(*(ratio(name, "step", AGAIN) for name in ("coat", "coat_fast")))),
    Claim("That with the products of the output head in FP8, too (`Recipe.head`)", "step_vocab",
          several(*(ratio(f"{name}, 8-bit head", "step", AGAIN) for name in ("coat", "coat_fast")))),
    Claim("A training step of a user's Llama of 1.1 B parameters: `coat`; a loss is read when the next step has begun",
          "models", ratio("coat", "step", "bf16", "Llama 1.1B")),
    *(Claim(f"The same of a user's {text}: `coat_fast`; and where the host reads the loss after each step", name,
            several(*(ratio("coat_fast", f"step{how}", "bf16", case) for how in ("", ", synchronised"))))
      for name, (case, text) in USERS.items()),
    Claim("The same Llama written in Linen: `coat`", "models_llama1b_linen",
          ratio("coat", "step", "bf16", "Llama 1.1B in Linen")),
    Claim("The same in Equinox", "models_llama1b_equinox", ratio("coat", "step", "bf16", "Llama 1.1B in Equinox")),
    Claim("The same in NNX on two GPUs, data parallel, 8 x 2,048 tokens each: `coat_fast`", "models_two",
          ratio("coat_fast", "step", "bf16")),
    Claim("The same in NNX with blocks checkpointed by `dots_with_no_batch_dims_saveable`: `coat`, `coat_fast`",
          "models_llama1b_dots", several(*(ratio(name, "step", "bf16") for name in ("coat", "coat_fast")))),
    Claim("Memory to train all of a Llama-2-7B on one GPU, 1 x 2,048 tokens: `coat`; updated in the backward pass "
          "(`fp8jax.fused_backward`); that with weights in bf16", "release",
          several(*(value(f"coat{how}", "memory", "GB") for how in ("", ", released")),
                  value("coat_fast, released, bf16 weights", "memory", "GB")),
          "79.3 GB (COAT, Table 11)", beside("bf16", value("bf16", "memory", "GB"))),
    Claim("The same in `coat`, master weights in bf16 with a remainder in int8; updated in the backward pass",
          "release", several(*(value(f"coat{how}{PARTS}", "memory", "GB") for how in ("", ", released"))),
          "79.3 GB (COAT, Table 11)"),
    Claim("Those two: speed over bf16 products with `coat`'s moments and fp32 masters, updated in the backward "
          "pass", "release",
          several(*(ratio(f"coat{how}{PARTS}", "step") for how in ("", ", released")))),
    Claim("That step in `coat`, updated in the backward pass, and with weights in bf16: speed over bf16 products with "
          "`coat`'s moments", "release",
          several(*(ratio(name, "step") for name in ("coat, released", "coat_fast, released, bf16 weights")))),
    Claim("All of a Llama-2-7B on one GPU, the most sequences of 2,048 tokens that fit in 80 GB, updated in the "
          "backward pass, masters of bf16 and int8: tokens a second in `coat`, sequences", "release_most",
          several(*(value(f"coat, released{PARTS}", *what) for what in MOST)),
          "11,351 a GPU, on two, 4 sequences (COAT, Table 11)",
          beside("bf16 products", several(*(value(f"bf16, released{PARTS}", *what) for what in MOST)))),
    Claim("All of a Llama-3-8B on one GPU, a sequence of 8,192 tokens, likewise: `coat`; memory", "release_8b",
          several(*(value(f"coat, released{PARTS}", *what)
                    for what in (("tokens", "tokens/s", 0), ("memory", "GB"))))),
    Claim("All of a Llama-2-7B on two GPUs (FSDP), the most sequences of 4,096 tokens that fit, likewise: tokens a "
          "second and GPU, sequences a GPU", "release_two",
          several(*(value(f"coat, released{PARTS}", *what) for what in MOST_EACH)),
          "16,934 a GPU, on eight (NVIDIA's NeMo, FP8)"),
    Claim("The same on four GPUs", "release_four",
          several(*(value(f"coat, released{PARTS}", *what) for what in MOST_EACH)),
          "16,934 a GPU, on eight (NVIDIA's NeMo, FP8)"),
    Claim("All of a Llama-2-13B on four GPUs, the most sequences of 2,048 tokens that fit, likewise",
          "release_13b_four", several(*(value(f"coat, released{PARTS}", *what) for what in MOST_EACH)),
          "21,180 in all, on four (COAT, Table 8)"),
    Claim("All of a Llama-3-8B on two GPUs, the most sequences of 8,192 tokens that fit, likewise", "release_two_8b",
          several(*(value(f"coat, released{PARTS}", *what) for what in MOST_EACH)),
          "14,451 a GPU, on eight (NVIDIA's Megatron-Bridge, FP8)"),
    Claim("All of a Llama-2-13B on two GPUs, a sequence of 2,048 tokens each, likewise: memory of one; all gradients "
          "held", "release_13b", several(*(value(f"coat{how}{PARTS}", "memory", "GB") for how in (", released", "")))),
    Claim("Adapters of a Llama-3.1-8B on a base in e4m3, 1 x 2,048 tokens: speed over a base in bf16, memory", "lora",
          several(ratio("fast on e4m3", "step"), value("fast on e4m3", "needs", "GB")), "",
          beside("base in bf16", value("bf16 on bf16", "needs", "GB"))),
    Claim("Memory of the first step, times fewer bytes, `coat`", "step", ratio("coat", "memory", AGAIN, ONE),
          "1.52 to 1.54 (Table 8)",
          beside("te_current", ratio("te_current", "memory", AGAIN, ONE))),
    Claim("Temporaries of that step, times fewer bytes, `coat`; `moss`, which keeps bf16 where nothing is multiplied",
          "step", several(ratio("coat", "temporaries", AGAIN, ONE), ratio("moss", "temporaries", AGAIN, ONE)),
          "activations of `moss` 1.80 (MOSS, Table 5)"),
    Claim("That step with layers cut over two GPUs (tensor and sequence parallel), `coat`, codes between them; bytes "
          "exchanged", "step_tensor",
          lambda result: f"{ratio('coat', 'step')(result)}; {exchanged(result, 'coat')}", "",
          lambda result: f"bf16 {exchanged(result, AGAIN)}"),
    Claim("That step on two GPUs, data parallel and FSDP, `coat`", "step_two",
          several(ratio("coat", "step", AGAIN, DATA), ratio("coat", "step", AGAIN, FSDP)), "",
          beside("fast", several(ratio("fast", "step", AGAIN, DATA), ratio("fast", "step", AGAIN, FSDP)))),
    Claim("That step on four GPUs, data parallel, FSDP, and layers cut over two with FSDP over two, `coat`; tokens a "
          "second and GPU", "step_four",
          several(*(ratio("coat", "step", AGAIN, case) for case in FOUR),
                  lambda result: span([row["value"] / 4 for row in result["rows"] if row["metric"] == "tokens/s"
                                       and row["impl"] == "coat"], digits=0)), "",
          lambda result: "bf16 " + str(span([row["value"] / 4 for row in result["rows"] if row["metric"] == "tokens/s"
                                             and row["impl"] == AGAIN], digits=0))),
    Claim("That step on four GPUs, data parallel: `coat`; with gradients in 8 bits, one phase; `fp8_lm`",
          "step_gradients_four",
          several(*(ratio(name, "step", AGAIN) for name in ("coat", "coat, 8-bit gradients, one phase", "fp8_lm")))),
    Claim("`7b`, FSDP over four GPUs, as many sequences as fit in 80 GB a GPU (bf16 6, `coat` 13): tokens a second",
          "step_7b_fit_four", ratio("coat", "tokens/s", AGAIN)),
    Claim("`7b`, FSDP over four GPUs, 4 sequences of 2,048 tokens a GPU: `coat`, `fp8_lm`", "step_7b_four",
          several(*(ratio(name, "step", AGAIN) for name in ("coat", "fp8_lm"))), "1.43 (COAT)"),
    Claim("`13b`, FSDP over four GPUs, as many sequences as fit in 76 GB a GPU (bf16 2, `coat` 6): tokens a second",
          "step_13b_four", several(ratio("coat", "tokens/s", AGAIN), value("coat", "tokens/s", "in all", 0)),
          "2.25, 21,180 in all (COAT, Table 8)"),
    Claim("`7b`, FSDP over two GPUs, 4 sequences of 2,048 tokens a GPU: `coat`, `fp8_lm_two_phase`", "step_7b",
          several(*(ratio(name, "step", AGAIN, FSDP_7B) for name in ("coat", "fp8_lm_two_phase"))), "1.43 (COAT)"),
    Claim("The same with as many sequences as fit in 80 GB a GPU (bf16 4, `coat` 10): tokens a second", "step_7b_fit",
          ratio("coat", "tokens/s", AGAIN, FIT_7B), "1.85 (COAT, Table 8)"),
    Claim("A Llama-7B layer forward and backward, `coat`: speed over bf16 as written, nothing recomputed", "layer",
          ratio("COAT, lean", "time", "bf16"), "1.54 to 1.58 (COAT, Table 7)",
          beside("te_current", ratio("te_current", "time", "bf16"))),
    Claim("The same layer by `moss`, `fast`, `int8_fallback`", "layer",
          several(*(ratio(name, "time", "bf16") for name in ("moss", "fast", "int8_fallback")))),
    Claim("The same with bounded scales (`coat_fast`) and weights quantized before, once for all "
          "microbatches of a step", "layer", ratio(BOUNDED, "time", "bf16")),
    Claim("That with the time of quantizing weights counted: 1, 4 and 16 microbatches", "layer",
          several(*(ratio(BOUNDED, f"time, {n}", "bf16")
                    for n in ("1 microbatch", "4 microbatches", "16 microbatches")))),
    Claim("That as fp8jax's functions, over bf16 of Flax modules, as written", "layer",
          ratio(f"{BOUNDED}, as functions", "time", "bf16")),
    Claim("The same, over bf16 as functions, nothing recomputed", "layer",
          ratio(f"{BOUNDED}, as functions", "time, bf16, as functions")),
    Claim("Bytes that a layer keeps for its backward pass, times fewer than what Flax's modules keep in bf16 (35 U), "
          "faithful and lean", "coat_memory", several(ratio("COAT, faithful", "total"), ratio("COAT, lean", "total"))),
    Claim("The same against the 22.66 U that the paper counts for bf16", "coat_memory",
          several(against_22("COAT, faithful"), against_22("COAT, lean")), "1.7 (Table 2)"),
    Claim("The same against bf16 that keeps only what products and attention give", "coat_memory",
          several(ratio("COAT, faithful", "total, recomputed"), ratio("COAT, lean", "total, recomputed"))),
    Claim("Bytes that a layer keeps for its backward pass, `int8_fallback`: less than what Flax's modules keep in "
          "bf16; than bf16 that keeps only what products and attention give (negative: more)", "int8_memory",
          several(value("int8_fallback", "less than bf16", "%"),
                  value("int8_fallback", f"less than {AGAIN}", "%")), "38 % (section 1, PyTorch's modules)"),
    Claim("Activations that Llama-2-7B keeps, on paper, `moss`: times fewer than what Flax's modules keep in bf16; "
          "than bf16 that keeps only what products and attention give (below 1: more)", "plans",
          several(quotient("bf16", "moss", "activations"), quotient(AGAIN, "moss", "activations")),
          "1.80 (MOSS, Table 5)"),
    Claim("RMSNorm that also keeps codes, over the plain norm: times as long", "coat_speed",
          lambda result: span([row["ratio"] for row in result["rows"] if row["table"].startswith("Table 12")
                               and row["pivot"][1] == "RMSNorm with quantization"], "x"),
          "1.03 to 1.16 (COAT, Table 12)"),
    Claim("Llama's linear layers forward and backward, one scale a tensor: speed over bf16 by XLA", "linear",
          ratio("te_current", "rate", case=MEANS), "", beside("1x128 groups (deepseek)",
          ratio("deepseek", "rate", case=MEANS))),
    Claim("The same with fast accumulation in all products", "linear",
          ratio("te_current, fast accumulation", "rate", case=MEANS)),
    Claim("An FP8 product of 1x128 by 128x128 groups: speed over PyTorch's", "gemm",
          ratio("ours block", "rate", case=MEANS)),
    Claim("An FP8 product with one scale a tensor: speed over the better of cuBLASLt and PyTorch", "gemm",
          ratio("ours tensor", "rate", case=MEANS)),
    Claim("An INT8 product of 128x128 blocks: speed over XLA's bf16", "gemm_int8",
          ratio("ours int8 block", "rate", case=MEANS), "2.58x (RTX 4090, section 1)",
          beside("XLA's int8 without scales", ratio("xla int8 to int32", "rate", case=MEANS))),
    Claim("The same with 10 to 50 % of blocks in 16 bits: share of 1 / (1 + r), at random; sequentially", "gemm_int8",
          several(of_ideal("random"), of_ideal("sequential"))),
    Claim("Quantization to e4m3 with one scale: share of a copy's bandwidth", "quantize",
          ratio("e4m3 (triton)", "bandwidth", case=MEANS, unit=""), "",
          beside("XLA", ratio("e4m3 (xla)", "bandwidth", case=MEANS, unit=""))),
    Claim("AdamW with 8-bit moments, `tx.update` and `optax.apply_updates` as every optax user writes it, sustained: "
          "speed over `optax.adamw`", "optimizer",
          ratio(f"{OURS} update + apply", SUSTAINED, "optax.adamw float32"), "",
          several(beside("torchao 8-bit", ratio("torchao AdamW8bit", "speed")),
                  beside("bitsandbytes 8-bit", ratio("bitsandbytes AdamW8bit", "speed")))),
    Claim("The same by `tx.step`, which writes the new weights; in a short burst, at a higher clock", "optimizer",
          several(*(ratio(f"{OURS} step", metric, "optax.adamw float32", FP32) for metric in (SUSTAINED, "speed")))),
    Claim("`tx.step` with fp32 weights, sustained: share of the speed of moving its bytes; in a burst", "optimizer",
          several(*(ratio(f"{OURS} step", metric, "bytes only", FP32, unit="") for metric in (SUSTAINED, "speed")))),
    Claim("FP8-LM's AdamW with master weights, 6 bytes a parameter, `tx.step` with FP8 gradients, sustained: speed "
          "over `optax.adamw` in fp32; over the same by XLA", "optimizer",
          several(ratio("fp8lm_adamw step", SUSTAINED, "optax.adamw float32", "FP8-LM, fp8"),
                  ratio("fp8lm_adamw step", SUSTAINED, "fp8lm_adamw step, XLA", "FP8-LM, fp8"))),
    *(Claim(f"AdamW in 8 bits, error of its updates, {text}: `compressed_adamw`, b2 0.95; 0.999", "peers",
            several(*(error(PEER_OURS, f"{stream}, b2 {b2}") for b2 in ("0.95", "0.999"))), "",
            several(*(beside(label, several(*(error(name, f"{stream}, b2 {b2}") for b2 in ("0.95", "0.999"))))
                      for label, name in PEERS.items())))
      for stream, text in PEER_STREAMS.items()),
    Claim("Error of m/sqrt(v) in e4m3: times lower with range expansion of both moments", "coat_optimizer",
          lambda result: span([1 / find(result, "E4M3 + Expand | E4M3 + Expand", "MSE of m/sqrt(v)", "ratio")[0]], "x"),
          "1.63 (COAT, Table 1)"),
    Claim("Scales and codes of all weights of Llama-7B, automatic scaling: share of the time just in time", "scaling",
          ratio("automatic", "codes", case="all weights", unit=""), "scales alone: 0.05 (MOSS, Table 10)"),
    Claim("Automatic weight scale over the just-in-time one, smallest and mean, interval 500", "moss_scaling",
          several(value("limit of Adam, interval 500", "smallest ratio", "", 3),
                  value("limit of Adam, interval 500", "mean ratio", "", 3))),
    *(Claim(f"Validation loss of `{name}` above bf16's with the same seeds, 65 M parameters, 400 steps, {seeds} seeds",
            "recipe_parity", above(name), "")
      for name, seeds in (("coat", 5), ("coat_fast", 10), ("fast", 5), ("int8_fallback", 5), ("fp8_lm", 5),
                          ("coat, fast accumulation", 5))),
    *(Claim(f"Validation loss of `moss` above bf16's with the same seeds, 13 M parameters, 5 seeds, weights "
            f"measured {text}",
            "recipe_parity_intervals", above(name), paper)
      for name, text, paper in (
          ("moss_interval_1", "every step", "NumGLUE 59.3 % (bf16 58.7; MOSS, Table 9)"),
          ("moss", "every 500 steps", "59.4 %"),
          ("moss_interval_2000", "at the start only", "58.1 % (every 2,000 steps)"))),
    Claim("Answers after further training, `moss` less bf16, three kinds of sums in a model of 128 channels",
          "moss_accuracy", several(*(value("moss less bf16, larger", kind, "%")
                                   for kind in ("sums", "the largest of three", "remainders"))),
          "+0.5, -0.5, +0.7 (MOSS, Table 3)"),
    Claim("Loss with master weights in bf16, and in e4m3, above fp32 masters, five seeds of a small model",
          "fp8_lm_masters", several(*(value(f"master {name}", "above fp32", "nats", 3) for name in ("bf16", "e4m3"))),
          "slightly worse than fp16; degrades (FP8-LM, Table 6, Figure 8)"),
    Claim("Validation loss after fine-tuning on answers, above bf16's with the same seeds, three seeds: `coat`; "
          "`moss`; `int8_fallback`", "finetuning",
          several(*(value(arm, "validation: % above bf16", "%", 2) for arm in ("coat", "moss", "int8_fallback")))),
    Claim("The same of adapters on codes of e4m3, which train fewer weights: above bf16's of all weights", "finetuning",
          value("LoRA on e4m3", "validation: % above bf16", "%"), "",
          beside("adapters on bf16", value("LoRA on bf16", "validation: % above bf16", "%"))),
    *(Claim(f"Loss of `bf16` with {text}, from fp32 masters, 65 M parameters, 400 steps, 3 seeds", "training_parity",
            difference(arm))
      for arm, text in (("master_bf16_int8", "masters of bf16 and int8"),
                        ("master_bf16_stochastic", "masters of bf16, rounded stochastically"),
                        ("released", "layers updated in the backward pass, clipped by the norm of the step before (an "
                         "earlier form)"))),
    Claim("A GLU model with outliers trained on in int8: validation loss above bf16, `int8_fallback`", "int8_diverges",
          value("int8_fallback", "validation loss: % above bf16", "%", 2), "none (Figure 8a)",
          beside("int8_block", value("int8_block", "validation loss: % above bf16", "%", 2))),
    Claim("INT8 fallback's two halves of 8 bits, error over that of 16-bit integers: one outlier 1,000 times the other "
          "values of a made-up block; a model's activations without such, and with outliers of factor 256",
          "int8_outliers",
          several(value("1 of 16,384 values, 1000 times the others", "two halves of 8 bits over 16", "", 2),
                  value("factor 1, input of down", HALVES, "", 2), value("factor 256, input of down", HALVES, "", 2)),
          "below 1 (Figure 3(b))"),
    Claim("Choice of 20 % of the blocks, 1 - cosine of gradients with outliers of factor 256: by largest, by error, by "
          "relative one",
          "int8_outliers", several(*(value(f"factor 256, {name}, 20%", COSINES, "", 3) for name in CRITERIA)),
          "the first two alike, the third worse (Figure 3(c))",
          beside("without outliers", several(*(value(f"factor 1, {name}, 20%", COSINES, "", 5) for name in CRITERIA)))),
    Claim("Perplexity above the unquantized one, with outliers of factor 256: large blocks; with 20 % that fall back; "
          "blocks a quarter as large; the last two with factor 1024", "int8_outliers",
          several(*(value(f"factor {name}", PERPLEXITY, "%", 1) for name in
                    ("256, blocks of 32", "256, blocks of 32, 20% fall back", "256, blocks of 8",
                     "1024, blocks of 32, 20% fall back", "1024, blocks of 8"))),
          "fallback makes up for larger blocks (Figure 4(b))"),
    Claim("INT8 with fallback on Hopper, a layer of 7B over bf16 at the limit of its products' and a copy's measured "
          "speed", "int8_limit", value("a layer of 7B, int8_fallback", "limit over bf16", "x", 2),
          "1.57, a step on an RTX 4090 (Table 2)",
          several(beside("measured", value("a layer of 7B, int8_fallback", "measured over bf16", "x", 2)),
                  beside("`fast` measured", value("a layer of 7B, fast", "measured over bf16", "x", 2)))),
    Claim("A GPT-2 layer 4,096 wide, 16 x 1,024 tokens, over bf16: `int8_fallback`; `int8_block`", "int8_speed",
          several(*(ratio(f"{name}, 4096 wide, both", "time") for name in ("int8_fallback", "int8_block"))),
          "(Table 3, on an RTX 4090; our copy has no numbers)",
          beside("`fast`", ratio("fast, 4096 wide, both", "time"))),
    Claim("Loss that scales of int8 blocks hide, which later tokens tell: `jetfire`, `int8_block`, `int8_fallback`",
          "int8_leak", several(*(value(name, "hidden: the last less the one before", "nats", 4)
                                 for name in ("jetfire", "int8_block", "int8_fallback"))), "(appendix E)"),
    Claim("SNR of three activations late in training: two-level microscaling by rows, over one scale a tensor",
          "moss_snr", several(beside("two-level", signal("two-level, row")), beside("tensor", signal("per tensor"))),
          "35.3 to 38.0 and 24.1 to 29.5 dB (MOSS, Table 7)", beside("rounding alone", signal("rounding alone"))),
    Claim("SNR of a weight's gradient late in training: both operands microscaled, shifted, not quantized again",
          "moss_snr", value("both two-level, x shifted (moss)", "dw, late", "dB"), "",
          beside("e5m2 gradients", value("all per tensor, gradients e5m2 (te_current)", "dw, late", "dB"))),
    Claim("Validation loss of `coat` with one mantissa bit in its forward products above bf16's, 65 M parameters, "
          "400 steps, 5 seeds: a control that must differ", "recipe_parity", above("control_one_bit")),
    Claim("Means of gradients over four GPUs in 8 bits, fp32 gradients left as codes, 64 MiB and 1 GiB in bf16: speed "
          "over bf16, summed by NCCL", "reduce_four",
          several(*(ratio("e4m3, one phase, left as codes", "time", case=f"{n} MiB, fp32") for n in (64, 1024))),
          "1.53 (24.8 to 16.2 ms a step; MOSS, Table 5), 1.33 (COAT, there)",
          beside("decoded", ratio("e4m3, one phase", "time", case="1024 MiB, fp32"))),
    Claim("The same below 64 MiB, where every 8-bit form loses: all forms, 1 to 16 MiB", "reduce_four",
          lambda result: span([row["ratio"] for row in result["rows"] if row["metric"] == "time"
                               and row["case"].startswith(("1 MiB", "4 MiB", "16 MiB")) and " phase" in row["impl"]
                               and not row["impl"].endswith("collectives")], "x")),
    Claim("The same in two phases, whose error does not grow with the number of GPUs", "reduce_four",
          several(*(ratio("e4m3, two phases, left as codes", "time", case=f"{n} MiB, fp32") for n in (64, 1024)))),
    Claim("Ratio of signal to noise of a mean over 1,024 replicas in 8 bits, two phases", "fp8_lm_gradients",
          value("ours, two phases, e4m3, 1024 replicas", "SNR", "dB"), "",
          several(beside("FP8-LM's auto-scale", value("auto-scale (equation 3), 1024 replicas", "SNR", "dB")),
                  beside("bf16", value("bf16, 1024 replicas", "SNR", "dB")))),
    Claim("Volume of weights and gradients between GPUs with `fp8_lm`, less than bf16 and fp32 of these, on paper",
          "plans", value("13b", "less than bf16 weights and fp32 gradients", "%"), "63 to 65 % (FP8-LM, Table 5)"),
]  # fmt: skip


def short(command: str) -> str:
    """A command without its options."""
    words = command.split()
    options = [i for i, word in enumerate(words) if word.startswith("-") and word != "-m"]
    return " ".join(words[: options[0]] if options else words)
