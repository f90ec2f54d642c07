"""Fine-tuning from a checkpoint: conversations with its template, answers, weights, and adapters."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import fp8jax
from experiments import evaluate
from experiments.errors import UserError
from experiments.models.llama import Llama, LlamaConfig
from experiments.text import chat
from experiments.text.records import TextRecord
from experiments.train import cli, config, start
from experiments.train.adapters import PEFT_NAMES
from experiments.train.optimizer import make_optimizer

pytest.importorskip("safetensors")
pytest.importorskip("jinja2")
TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, of course."},
)
SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 48}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of random weights and biases with a tokenizer and a template."""
    from experiments.hub import save

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(["What is it? It is of course brief. user assistant system"] * 3, trainer)
    llama = LlamaConfig(vocab=304, bias="qkv", **SHAPE)
    params = nnx.to_pure_dict(nnx.state(Llama(llama, rngs=nnx.Rngs(3)), nnx.Param))
    for name in "qkv":
        params["layers"]["attention"][name]["bias"] += 0.5
    save.save(folder, llama, params, dtype=jnp.bfloat16)
    model.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": model.token_to_id("<|im_end|>")}))
    return folder


def spelled(checkpoint):
    return start.tokenizer(cli.parse(["--init", str(checkpoint)]))


def test_answers_are_the_assistant_s_messages_with_their_end(checkpoint):
    tokenizer = spelled(checkpoint)
    document = start.conversation(TextRecord("x:1", None, TALK), chat.Template(checkpoint), tokenizer.model)
    runs, inside = [], False
    for i, answer in zip(document.ids, document.answers, strict=True):
        if answer and not inside:
            runs.append([])
        inside = bool(answer)
        if answer:
            runs[-1].append(int(i))
    answers = [tokenizer.model.decode(run, skip_special_tokens=False) for run in runs]
    assert answers == ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]


def test_text_and_answers_are_transformers_own(checkpoint):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    template = chat.Template(checkpoint)
    for ask in (False, True):
        expected = theirs.apply_chat_template(list(TALK), tokenize=False, add_generation_prompt=ask)
        assert template.render(TALK, "x", ask=ask) == expected
    expected = theirs.apply_chat_template(
        list(TALK), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    ours = start.conversation(TextRecord("x:1", None, TALK), template, spelled(checkpoint).model)
    assert ours.ids.tolist() == expected["input_ids"]
    # Theirs ends with the tag; ours includes the line break after it.
    differ = np.flatnonzero(ours.answers != np.array(expected["assistant_masks"]))
    assert {spelled(checkpoint).model.decode([int(ours.ids[i])]) for i in differ} <= {"\n"}
    assert len(differ) == 2


def test_templates_are_found_and_rendered_as_checkpoints_mean_them(tmp_path):
    """Without line breaks after tags and the space before them; text in JSON unchanged; the default of several."""
    written = "{{ bos_token }}\n  {% for m in messages %}\n  {{ m | tojson }}{{ strftime_now('%%') }}\n  {% endfor %}\n"
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": written}]
    settings = {"bos_token": {"content": "<b>", "__type": "AddedToken"}, "chat_template": several}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = ({"role": "user", "content": "<ü>"},)
    assert chat.Template(tmp_path).render(talk, "x") == '<b>\n  {"role": "user", "content": "<ü>"}%\n'
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert chat.Template(tmp_path).render(talk, "x") == "<ü>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content.what() }}")
    with pytest.raises(UserError, match="x: the chat template rejects it"):
        chat.Template(tmp_path).render(talk, "x")


def test_bad_templates_and_conversations_are_named(checkpoint, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    with pytest.raises(UserError, match="has no chat template"):
        chat.Template(folder)
    source = folder / "chat_template.jinja"
    source.write_text("{% if %}")
    with pytest.raises(UserError, match="its chat template is not valid"):
        chat.Template(folder)
    source.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"f:7: the chat template rejects it \(roles must alternate\)"):
        chat.Template(folder).spans(TALK, "f:7")
    source.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="f:7: the chat template formats the messages before message 2 differently"):
        chat.Template(folder).spans(TALK, "f:7")
    source.write_text("{{ messages[0].content }}{% if messages | length > 3 %}!{% endif %}{{ messages[1:] }}")
    with pytest.raises(UserError, match="f:7: the chat template formats the messages before message 2 differently"):
        chat.Template(folder).spans(TALK[:4], "f:7")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config.json cannot be read \(it is not a JSON object\)"):
        chat.Template(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json cannot be read"):
        chat.Template(folder)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = []
    for i in range(40):
        question = {"role": "user", "content": f"What is {i} + {i}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"It is {2 * i}."}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FLAGS = (  # noqa: SIM905 (a command line reads best as one)
    "--seq-len 48 --batch 4 --steps 8 --warmup 2 --lr 2e-3 --log-every 2 --checkpoint-every 4 --eval-every 4 "
    "--eval-batches 2 --sample-tokens 24 --mesh data=1 --valid-fraction 0.2"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--lora-rank", "4"]], ids=["whole", "adapters"])
def test_a_checkpoint_is_tuned_on_answers_and_resumes(checkpoint, talks, out, capsys, lora):
    name = "tuned_lora" if lora else "tuned"
    argv = [*FLAGS, "--init", str(checkpoint), "--data", str(talks), "--out", str(out), "--run", name,
            "--recipe", "te_current", *lora]  # fmt: skip
    assert cli.main(argv) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "(1 file)" in printed
    assert "40 of 1 files" in (out / name / "log.txt").read_text()
    folder = out / name / "te_current"
    whole = json.loads((folder / "result.json").read_text())["result"]
    # The first loss is the checkpoint's own on the first batch of the seed.
    settings = cli.parse(argv)
    tokenizer = start.tokenizer(settings)
    packed = start.encode(settings, start.read(settings), tokenizer)
    from experiments.hub import load
    from experiments.text import data

    batch = next(data.train_batches(packed.train, 48, 4, settings.seed))
    loaded = load.load(checkpoint)
    logits = loaded.model(jnp.float32)(batch[:, 0, :-1], batch[:, 2, :-1]).astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch[:, 0, 1:, None], -1)[..., 0]
    mean = float((losses * batch[:, 1, 1:]).sum() / batch[:, 1, 1:].sum())
    first = json.loads((out / name / "te_current" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(mean, abs=0.02)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "8")
    assert cli.main(argv) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    again = json.loads((folder / "result.json").read_text())["result"]
    assert again["valid_loss"] == whole["valid_loss"]
    if lora:
        assert len(fp8jax.lora.load(folder / "adapter", PEFT_NAMES)) == 7
    text = talks.with_name("text.txt")
    text.write_text("What is it? It is of course brief. " * 20)
    scored = ["--run", str(out / name), "--recipe", "te_current", "--data", str(text)]
    assert evaluate.main(scored) == 0
    from experiments.hub import __main__ as hub

    # The export has the tokenizer and the settings of the initial checkpoint.
    run, exported = ["--run", str(out / name), "--recipe", "te_current"], out / f"{name}_exported"
    assert hub.main([*run, "--out", str(exported), "--dtype", "float32"]) == 0
    tuned, expected = load.load(exported).params, evaluate.load(out / name, "te_current").params
    jax.tree.map(np.testing.assert_array_equal, tuned, jax.tree.map(lambda x: np.asarray(x, np.float32), expected))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / file).read_text() == (checkpoint / file).read_text()
    code = hub.main([*run, "--out", str(out / f"{name}_8"), "--eight", "recipe"])
    assert code == (2 if lora else 0)
    assert ("trained adapters" in capsys.readouterr().err) == bool(lora)


@pytest.mark.slow
def test_codes_of_a_checkpoint_are_the_base_as_they_are(checkpoint, talks, out, tmp_path, capsys):
    import fp8jax
    from experiments.hub import load, save
    from experiments.train import adapters
    from experiments.train.task import Task

    plain = load.load(checkpoint)
    folder = tmp_path / "eight"
    save.save(folder, plain.config, plain.params, like=checkpoint, eight=save.eight_bits("channel"))
    settings = cli.parse(["--init", str(folder), "--lora-rank", "4", "--base", "e4m3:token"])
    params = start.params(settings, None)
    decoded = start.params(cli.parse(["--init", str(folder), "--lora-rank", "4", "--base", "bf16"]), None)
    assert not any(isinstance(x, fp8jax.FrozenWeight) for x in decoded["layers"]["mlp"]["up"].values())
    recipe = adapters.base_recipe(fp8jax.recipes.te_current(), settings.lora)
    task = Task(plain.config, make_optimizer(settings, recipe), recipe, remat=False, seed=0,
                      lora=settings.lora)  # fmt: skip
    base = jax.jit(task.base)(params)
    assert jax.tree.structure(base) == jax.tree.structure(jax.eval_shape(task.base))
    for part, name in (("attention", "q"), ("mlp", "down")):
        stored = params["layers"][part][name]["kernel"]
        assert isinstance(stored, fp8jax.FrozenWeight)
        leaves = base["layers"][part][name]["held"]
        for one, other in zip((leaves[0], leaves[1]), jax.tree.leaves(stored), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert (np.asarray(base["layers"]["attention"]["q"]["bias"], np.float32) == 0.5).all()
    np.testing.assert_array_equal(
        np.asarray(base["embed"]["embedding"]), np.asarray(plain.params["embed"]["embedding"])
    )
    argv = [*FLAGS, "--init", str(folder), "--data", str(talks), "--out", str(out), "--run", "eight", "--recipe",
            "te_current", "--lora-rank", "4", "--sample-tokens", "0"]  # fmt: skip
    assert cli.main(argv) == 2
    assert "the checkpoint contains codes with spec e4m3:token; use --base e4m3:token" in capsys.readouterr().err
    assert cli.main([*argv, "--base", "e4m3:token"]) == 0
    assert len(fp8jax.lora.load(out / "eight" / "te_current" / "adapter", PEFT_NAMES)) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dim", "64"], "--dim is set by the checkpoint"),
        (["--tokenizer", "bpe"], "--tokenizer is set by the checkpoint"),
    ],
)
def test_what_the_checkpoint_says_is_not_given_too(checkpoint, talks, out, flags, message, capsys):
    argv = [*FLAGS, "--init", str(checkpoint), "--data", str(talks), "--out", str(out), "--run", "bad", *flags]
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_none_is_told(talks, out, capsys):
    argv = [*FLAGS, "--init", "no/such", "--data", str(talks), "--out", str(out), "--run", "bad"]
    assert cli.main(argv) == 2
    assert "no/such is neither a folder" in capsys.readouterr().err
    assert config.Config().model.init == ""
