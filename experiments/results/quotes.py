"""Sentences of README.md and of docs/ that quote figures, each looked up in results/CARD/NAME.json and written there.

A quote is a sentence with a place for each figure. One page must hold each sentence, once, with any figures and any
line breaks; `written` puts in what the files give. A figure of ours that stands in a page outside of these is found by
a test (tests/experiments/test_readme.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.results import lookup

Result = Mapping[str, Any]
Look = Callable[[Result], float | None]


class Figure(NamedTuple):
    """A figure: the file it is in, how it is looked up there, and how it is written."""

    bench: str
    look: Look
    form: str = ".2f"


class Quote(NamedTuple):
    """A sentence with `{}` for each figure, and `{card}` for the card that measured the first of them."""

    text: str
    figures: tuple[Figure, ...]


def one(impl: str, metric: str, field: str, baseline: str | None = None, case: str = "") -> Look:
    """The one figure of these; None where there is none or several."""

    def look(result: Result) -> float | None:
        found = lookup.find(result, impl, metric, field, baseline, case)
        return found[0] if len(found) == 1 else None

    return look


def ratio(bench: str, impl: str, metric: str, baseline: str | None = None, case: str = "", form: str = ".2f") -> Figure:
    """A ratio."""
    return Figure(bench, one(impl, metric, "ratio", baseline, case), form)


def value(bench: str, impl: str, metric: str, form: str, case: str = "") -> Figure:
    """A value."""
    return Figure(bench, one(impl, metric, "value", None, case), form)


def over(above: Look, below: Look) -> Look:
    """One figure over another."""

    def look(result: Result) -> float | None:
        top, bottom = above(result), below(result)
        return top / bottom if top is not None and bottom else None

    return look


def less(whole: Look, part: Look) -> Look:
    """One figure less another."""

    def look(result: Result) -> float | None:
        most, least = whole(result), part(result)
        return most - least if most is not None and least is not None else None

    return look


def _parity(arm: str, column: str, size: str, form: str) -> Figure:
    def look(result: Result) -> float | None:
        found = [r["value"] for r in result["rows"] if r["pivot"] == [arm, column] and r["table"] == size]
        return found[0] if len(found) == 1 else None

    return Figure("training_parity", look, form)


def _above(arm: str) -> tuple[Figure, Figure]:
    """By how much validation losses of seeds lie above bf16's, and half of the interval."""
    return (value("recipe_parity", arm, "validation loss: % above", "+.2f"),
            value("recipe_parity", arm, "± (validation loss)", ".2f"))  # fmt: skip


def _nearest(impl: str) -> Look:
    """What stochastic rounding of the second moment costs of a step, in %."""
    name = f"{lookup.OURS} step, second moment to nearest"
    speed = one(f"{lookup.OURS} step", "speed", "ratio", name, impl)
    return lambda result: None if (share := speed(result)) is None else 100 * (1 / share - 1)


def _extreme(impl: str, sizes: Sequence[str], pick: Callable[[Sequence[float]], float]) -> Figure:
    def look(result: Result) -> float | None:
        found = [x for size in sizes for x in lookup.find(result, impl, "time", "ratio", "bf16", f"{size} MiB, fp32")]
        return pick(found) if found else None

    return Figure("reduce_four", look)


def _clipped(arm: str, text: str, column: str, form: str) -> Figure:
    return value("release_clipping", f"{arm}, {text}", column, form)


def _spent(arm: str, *metrics: str) -> tuple[Figure, ...]:
    """Milliseconds of a step of a user's Llama by kind of kernels."""
    return tuple(value("profile_models", arm, metric, ".0f") for metric in metrics)


def _bound(passes: Look | None) -> Figure:
    """How many times as fast as bf16's its step would be, if our passes took nothing, or as little as these."""
    spent, least = one("coat_fast", "our passes", "value"), passes or (lambda _: 0.0)
    saved = less(spent, least)
    return Figure("profile_models", over(one("bf16", "all", "value"), less(one("coat_fast", "all", "value"), saved)))


def _waits(arm: str) -> Figure:
    """Milliseconds that a step takes longer where each loss is read at once."""
    at_once, late = (one(arm, f"step{how}", "value") for how in (", synchronised", ""))
    return Figure("models_gpt350m", less(at_once, late), ".0f")


CLIPPINGS, CLIPPED = ("shares of the norm before", "two backward passes"), ("validation: % above", "± (validation)")
STEP, AGAIN = lookup.ONE, lookup.AGAIN
SIZES = ("64", "256", "1024")
PARTS, SHORT = f", released{lookup.PARTS}", "Seeds of the larger model for 400 steps, each beside bf16's"
QUOTES = (
    Quote("in bursts of ten steps on one {card} `tx.update` with `optax.apply_updates` is {} times as fast as "
          "`optax.adamw`, and `tx.step`, which writes the new weights itself, {} times; over many steps, at a lower "
          "clock, `tx.step` has {} of the speed of moving its bytes.",
          (ratio("optimizer", "compressed_adamw update + apply", "speed", "optax.adamw float32"),
           ratio("optimizer", "compressed_adamw step", "speed", "optax.adamw float32", lookup.FP32),
           ratio("optimizer", "compressed_adamw step", lookup.SUSTAINED, "bytes only", lookup.FP32))),
    Quote("on two {card}s `coat` is {} (data parallel) and {} (FSDP) times as fast as bf16 with 1.1 B parameters",
          (ratio("step_two", "coat", "step", AGAIN, lookup.DATA),
           ratio("step_two", "coat", "step", AGAIN, lookup.FSDP))),
    Quote("with 6.7 B (FSDP) on two {card}s {} times, and {} with the batches that fit in 80 GB a GPU",
          (ratio("step_7b", "coat", "step", AGAIN), ratio("step_7b_fit", "coat", "tokens/s", AGAIN))),
    Quote("`moss_mx` has these, at {} times the time of a product with a scale a tensor on one {card}.",
          (Figure("gemm", over(one("ours tensor", "rate", "value", None, "8192x8192x8192"),
                               one("ours mx exact", "rate", "value", None, "8192x8192x8192"))),)),
    Quote("torch's bf16 (`torch.compile`, flash attention) takes {} ms for the step of the first table on one {card}, "
          "JAX's {}: over it `coat` is {} and `coat_fast` {} times as fast",
          (value("step", "torch bf16", "step", ".0f", STEP), value("step", AGAIN, "step", ".0f", STEP),
           *(Figure("step", over(*(one(of, "step", "value", None, STEP) for of in ("torch bf16", name))))
             for name in ("coat", "coat_fast")))),
    Quote("On one {card} a layer of Llama-7B is {} times as fast as bf16's.",
          (ratio("layer", "int8_fallback", "time", "bf16", "batch 4, length 4096"),)),
    Quote("It costs {} % of a step of the optimizer with fp32 weights and {} % with bf16 weights",
          (Figure("optimizer", _nearest("fp32 weights"), ".0f"), Figure("optimizer", _nearest("bf16 weights"), ".0f"))),
    Quote("On four {card}s a step of 1.1 B parameters in `coat` is {} times as fast as bf16's data parallel, {} times "
          "with FSDP and {} times with layers cut over two GPUs and FSDP over two",
          tuple(ratio("step_four", "coat", "step", AGAIN, case) for case in lookup.FOUR)),
    Quote("Data parallel over four {card}s, means of gradients in 8 bits bring it from {} to {}; `fp8_lm` is {} times "
          "as fast",
          tuple(ratio("step_gradients_four", name, "step", AGAIN)
                for name in ("coat", "coat, 8-bit gradients, one phase", "fp8_lm"))),
    Quote("With 6.7 B and FSDP over four {card}s, as many sequences as fit in 80 GB a GPU, `coat` trains {} times as "
          "many tokens a second as bf16",
          (ratio("step_7b_fit_four", "coat", "tokens/s", AGAIN),)),
    Quote("the fastest from 64 MiB on: {} to {} times bf16 left as codes on four {card}s. They lose with every "
          "addition: {} dB are left at 1,024 replicas, where two phases have {}. Two phases are {} to {} times bf16.",
          (_extreme("e4m3, one phase, left as codes", SIZES, min),
           _extreme("e4m3, one phase, left as codes", SIZES, max),
           value("fp8_lm_gradients", "auto-scale (equation 3), 1024 replicas", "SNR", ".0f"),
           value("fp8_lm_gradients", "ours, two phases, e4m3, 1024 replicas", "SNR", ".0f"),
           _extreme("e4m3, two phases, left as codes", SIZES, min),
           _extreme("e4m3, two phases, left as codes", SIZES, max))),
    Quote("In a whole step of 1.1 B parameters, data parallel, on two {card}s, they gain little: {} ms with `coat` "
          "against {} without.",
          (value("step_two", "coat, 8-bit gradients, one phase", "step", ".0f", lookup.DATA),
           value("step_two", "coat", "step", ".0f", lookup.DATA))),
    Quote("A step of a Llama-2-7B on one {card}, 1 x 2,048 tokens, layers checkpointed, needs {} GB in `coat` without "
          "and {} GB with it; with weights in bf16, which `fused_backward(..., key=jax.random.key(0))` rounds "
          "stochastically, {} GB in `coat_fast`",
          (value("release", "coat", "memory", ".1f"), value("release", "coat, released", "memory", ".1f"),
           value("release", "coat_fast, released, bf16 weights", "memory", ".1f"))),
    Quote("With as many sequences as fit, {} with masters by parts, one {card} trains at {} tokens a second in `coat`, "
          "and at {} with products and moments of bf16's, whose state leaves room for {}.",
          (value("release_most", f"coat{PARTS}", "batch", ".0f"),
           value("release_most", f"coat{PARTS}", "tokens", ",.0f"),
           value("release_most", f"bf16{PARTS}", "tokens", ",.0f"),
           value("release_most", f"bf16{PARTS}", "batch", ".0f"))),
    Quote("Two {card}s, their states cut by FSDP, train the 7B at {} tokens a second each, {} sequences of 4,096 "
          "tokens at a time, and a Llama-3-8B at {}, {} of 8,192. A 13B at one sequence of 2,048 each needs {} GB of "
          "each, and {} GB where all gradients are held",
          (*(value(bench, f"coat{PARTS}", metric, form) for bench in ("release_two", "release_two_8b")
             for metric, form in (("tokens", ",.0f"), ("batch", ".0f"))),
           *(value("release_13b", f"coat{how}{lookup.PARTS}", "memory", ".1f") for how in (", released", "")))),
    Quote("With 128,256 entries a step of 1.1 B parameters on one {card} is so {} (`coat`) and {} (`coat_fast`) times "
          "as fast as bf16 that takes logits in chunks and recomputes, and {} and {} without.",
          tuple(ratio("step_vocab", f"{name}{how}", "step", AGAIN) for how in (", 8-bit head", "")
                for name in ("coat", "coat_fast"))),
    Quote("At sixteen sequences of 2,048 tokens on one {card} that step, released, then needs {} GB, and {} GB "
          "without, and has {} of the speed",
          (value("release_offload", f"coat, released, offloaded{lookup.PARTS}", "memory", ".1f"),
           value("release_offload", f"coat{PARTS}", "memory", ".1f"),
           ratio("release_offload", f"coat, released, offloaded{lookup.PARTS}", "step"))),
    Quote("With 65 M parameters, 400 steps of books and three seeds on one {card}, the norm of the step before in "
          "place of shares of it, as it was until then, ended {} ± {} % from the plain step in validation loss",
          (_parity("released", "validation loss: % above bf16", SHORT, "+.1f"),
           _parity("released", "± (validation loss)", SHORT, ".1f"))),
    Quote("With one batch, 1.1 B parameters and ten seeds on one {card}, the mean loss of `coat_fast`'s first 21 steps "
          "is {} ± {} % from bf16's, and its loss of step 21 {} ± {} %",
          tuple(value("fixed_batch", "coat_fast", metric, form)
                for name in ("mean loss of 21 steps", "loss of step 21")
                for metric, form in ((f"{name}: % above", "+.1f"), (f"± ({name})", ".1f")))),
    Quote("Shares of it, three seeds on one {card}, ended {} ± {} % from it", _above("released_by_shares")),
    Quote("With 65 M parameters, 400 steps of books, ten seeds on one {card}, its validation loss ended {} ± {} % from "
          "bf16's, and `coat`'s, five seeds, {} ± {} %", (*_above("coat_fast"), *_above("coat"))),
    Quote("With fast accumulation in all three products `coat` ended {} ± {} % from bf16 on one {card}",
          _above("coat, fast accumulation")),
    Quote("In the input's gradient alone fast accumulation is not told from none on one {card}: {} ± {} %",
          _above("coat_fast, fast dgrad")),
    Quote("A control that must differ, `coat` whose forward products read codes of one mantissa bit, ended {} ± {} % "
          "from bf16 on one {card}", _above("control_one_bit")),
    Quote("Trained with it, `coat` with 65 M parameters ended {} ± {} % from bf16's validation loss, over five seeds "
          "of 400 steps on one {card}, and {} ± {} % without", (*_above("coat_fp8_head"), *_above("coat"))),
    Quote("On four {card}s a step of 6.7 B parameters, FSDP, four sequences of 2,048 tokens a GPU, is {} times as fast "
          "in `coat` as in bf16, and {} times in `fp8_lm`",
          tuple(ratio("step_7b_four", name, "step", AGAIN) for name in ("coat", "fp8_lm"))),
    Quote("On four {card}s means left as codes are {} times as fast as bf16's at 64 MiB and {} times at 1 GiB in one "
          "phase, {} and {} times in two; at 16 MiB one phase takes longer than bf16, {} times as fast",
          tuple(ratio("reduce_four", f"e4m3, {how}", "time", "bf16", f"{n} MiB, fp32") for how, n in
                (("one phase, left as codes", 64), ("one phase, left as codes", 1024),
                 ("two phases, left as codes", 64), ("two phases, left as codes", 1024), ("one phase", 16)))),
    Quote("with 13 B, as many as fit in 76 GB of each {card}, `coat` trains {} times as many tokens a second",
          (ratio("step_13b_four", "coat", "tokens/s", AGAIN),)),
    Quote("shares of the norm before {} ± {} % from the plain step's validation loss, two passes {} ± {} % "
          "(means and standard deviations of six orders of a small model, of which rounding alone makes that of two "
          "passes). Where each 40th batch is random "
          "bytes, whose gradients are large at once, shares end {} ± {} % from it, and two passes {} ± {} %",
          tuple(_clipped(arm, text, column, form) for text in ("text", "text, each 40th batch random bytes")
                for arm in CLIPPINGS for column, form in zip(CLIPPED, ("+.1f", ".1f"), strict=True))),
    Quote("{} dB less noise than e5m2 per tensor",
          (Figure("moss_snr", less(*(one(name, "dw, late", "value") for name in
                                     ("both two-level, x shifted (moss)",
                                      "all per tensor, gradients e5m2 (te_current)"))), ".0f"),)),
    Quote("Of a user's Llama with 1.1 B parameters, 8 x 2,048 tokens, a step of `coat_fast` keeps one {card} busy for "
          "{} ms: {} of 8-bit products, which the data sheet's rate would do in {}, {} of attention, {} of our passes, "
          "which the memory's peak would do in {}, {} of the head's products in 16 bits and {} of XLA's passes. In "
          "bf16 it is {} ms: {} of products, {} of attention and {} of XLA's passes. Without any pass of ours the step "
          "would be {} times as fast as bf16's, with all of them at the memory's peak {} times.",
          (*_spent("coat_fast", "all", "8-bit products", "8-bit products, at the peak", "attention", "our passes",
                   "our passes, at the peak", "16-bit products", "XLA's passes"),
           *_spent("bf16", "all", "16-bit products", "attention", "XLA's passes"), _bound(None),
           _bound(one("coat_fast", "our passes, at the peak", "value")))),
    Quote("The state of GPT-2 350M has {} arrays in bf16 and {} in `coat_fast`; a step that is read at once waits {} "
          "and {} ms longer on one {card}",
          (*(value("models_gpt350m", arm, "arrays", ",.0f") for arm in ("bf16", "coat_fast")),
           _waits("bf16"), _waits("coat_fast"))),
)  # fmt: skip


def pattern(quote: Quote) -> re.Pattern[str]:
    """Finds a sentence with any figures and line breaks."""
    words = re.split(r"(\{card\}|\{\}|\s+)", quote.text)
    forms = {"{}": r"([+-]?\d[\d,.]*?)", "{card}": r"([A-Z]+\d+)"}
    return re.compile("".join(forms.get(w) or (r"\s+" if w.isspace() else re.escape(w)) for w in words))


def latest(of_cards: Mapping[str, Result], looks: Sequence[Look]) -> tuple[str, Result]:
    """The card and file that were measured last and have all of some figures, or the last of all where none has.

    Whole files come before those cut short; of a day's the last by name.
    """
    order = sorted(of_cards, key=lambda card: (of_cards[card].get("complete", True), of_cards[card]["date"], card))
    card = next((c for c in order[::-1] if all(look(of_cards[c]) is not None for look in looks)), order[-1])
    return card, of_cards[card]


def written(pages: Mapping[str, str], results: Mapping[str, Mapping[str, Result]]) -> dict[str, str]:
    """Pages, by name, with the figures of every quote as the files give them.

    Raises:
        ValueError: a sentence does not stand once in all of them, or a figure is in no file; the message names it.
    """
    new = dict(pages)
    for quote in QUOTES:
        found = [(name, match) for name, text in new.items() for match in pattern(quote).finditer(text)]
        if len(found) != 1:
            raise ValueError(f"README.md and docs/ hold this {len(found)} times, not once: {quote.text}")
        ((name, match),) = found
        new[name] = _put(new[name], quote, match, results)
    return new


def _put(page: str, quote: Quote, match: re.Match[str], results: Mapping[str, Mapping[str, Result]]) -> str:
    """The page with the figures of one quote, where `match` found it."""
    told, cards = [], list[str]()
    for figure in quote.figures:
        looks = [other.look for other in quote.figures if other.bench == figure.bench]
        where, result = latest(results[figure.bench], looks) if figure.bench in results else ("", {"rows": []})
        number = figure.look(result)
        if number is None:
            raise ValueError(f"no figure in results/*/{figure.bench}.json for the sentence: {quote.text}")
        cards.append(where.partition("x")[0].upper())
        told.append(format(number, figure.form))
    if "{card}" in quote.text and len({card for card in cards if card != "CPU"}) > 1:
        raise ValueError(f"figures of several cards, {', '.join(dict.fromkeys(cards))}, in one sentence: {quote.text}")
    numbers = iter(told)
    new = [cards[0] if place == "{card}" else next(numbers) for place in re.findall(r"\{card\}|\{\}", quote.text)]
    for i in range(len(new), 0, -1):
        page = page[: match.start(i)] + str(new[i - 1]) + page[match.end(i) :]
    return page
