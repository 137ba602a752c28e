"""Hugging Face's GPT-2, Llama and Mixtral → our file → the same logits, and back → the same bits."""

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT, close

try:
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(f"{error} (make deps installs it)", allow_module_level=True)

import hf
import reference

CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_positions=40, n_embd=48, n_layer=3, n_head=4, n_inner=112, bos_token_id=0, eos_token_id=0
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=97,
        max_position_embeddings=40,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
}
CONFIGS["llama-tied"] = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "tie_word_embeddings": True})
CONFIGS["mixtral"] = transformers.MixtralConfig(
    vocab_size=97,
    max_position_embeddings=40,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    rope_theta=500000.0,
    num_local_experts=5,
    num_experts_per_tok=3,
)
FLAGS = {
    "gpt2": "--arch gpt2 --layers 3 --heads 4 --kv-heads 4 --hidden 48 --ffn 112 --vocab 97 --seq 40",
    "llama": "--arch llama --layers 3 --heads 6 --kv-heads 2 --hidden 48 --ffn 80 --vocab 97 --seq 40"
    " --rope-theta 500000",
}
FLAGS["llama-tied"] = FLAGS["llama"] + " --tie"
FLAGS["mixtral"] = (
    "--arch llama --layers 2 --heads 6 --kv-heads 2 --hidden 48 --ffn 32 --vocab 97 --seq 40"
    " --rope-theta 500000 --experts 5 --topk 3 --expert-ffn 32"
)


def model_of(config):
    """Every parameter random: with zero biases and unit norms, mixed-up ones would go unseen."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def script(*arguments, code=0):
    """What dev/hf.py prints, run in this process (PyTorch takes a second to start)."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            hf.main([str(a) for a in arguments])
        except SystemExit as e:
            status = e.code
    assert status == code, out.getvalue() + err.getvalue()
    if code:
        assert len(err.getvalue().splitlines()) == 1 and err.getvalue().startswith("hf.py: "), err.getvalue()
    return err.getvalue() if code else out.getvalue()


def logits(model):
    tokens = torch.from_numpy(np.random.RandomState(3).randint(0, 97, (2, 40)))
    with torch.no_grad():
        out = model(tokens)
    return out if torch.is_tensor(out) else out.logits


@pytest.fixture(params=CONFIGS)
def there(request, tmp_path):
    """(name, Hugging Face's model, our file made from it)"""
    model = model_of(CONFIGS[request.param])
    model.save_pretrained(tmp_path / "hf")
    said = script("import", tmp_path / "hf", tmp_path / "ours.safetensors")
    assert said.strip() == f"{FLAGS[request.param]} --init {tmp_path / 'ours.safetensors'}"
    return request.param, model, tmp_path / "ours.safetensors"


def test_logits_are_those_of_our_model(there):
    _, model, ours = there
    expected, got = logits(model), logits(reference.load_model(ours))
    assert expected.abs().max() > 0.5
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def loss_of(model, tokens):
    """Hugging Face's mean loss over windows [n, T + 1]."""
    with torch.no_grad():
        out = model(tokens[:, :-1])
    x = (out if torch.is_tensor(out) else out.logits).double()
    return torch.nn.functional.cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten()).item()


def shard(path, tokens):
    """llm.c's format: 256 int32 of header (magic, version, count), then uint16 tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())
    return path


@pytest.mark.parametrize("windows, T", [(1, 40), (5, 40), (3, 17), (4, 1)])
def test_the_program_agrees(there, tmp_path, train, windows, T):
    """The program evaluates Hugging Face's weights to Hugging Face's loss; trains them; and Hugging Face agrees again."""
    name, model, ours = there
    r = np.random.RandomState(T)
    data = shard(tmp_path / "data.bin", r.randint(0, 97, 4000))
    tokens = r.randint(0, 97, windows * T + 1)
    val = shard(tmp_path / "val.bin", tokens)
    rows = torch.from_numpy(np.stack([tokens[i * T : i * T + T + 1] for i in range(windows)]))
    common = ["--data", data, "--val", val, "--seq", T, "--init", ours, "--micro-batch", 2, "--save"]
    still = train(*common, tmp_path / "still", "--steps", 1, "--lr", 0)
    assert close(still.one("val")["loss"], loss_of(model, rows), 2e-6)
    moved = train(*common, tmp_path / "moved", "--steps", 3, "--lr", 1e-2)
    script("export", tmp_path / "moved" / "step-00000003" / "weights.safetensors", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert not close(loss_of(back, rows), loss_of(model, rows), 1e-4), "nothing was trained"
    assert close(moved.one("val")["loss"], loss_of(back, rows), 2e-6)


def test_back_again_bit_for_bit(there, tmp_path):
    _, model, ours = there
    script("export", ours, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(model)
    a, b = dict(model.named_parameters()), dict(back.named_parameters())
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert torch.equal(logits(model), logits(back))
    script("import", tmp_path / "back", tmp_path / "again.safetensors")
    x, y = load_file(ours), load_file(tmp_path / "again.safetensors")
    assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def test_export_without_metadata_takes_arguments(there, tmp_path):
    name, model, ours = there
    save_file(load_file(ours), tmp_path / "bare.safetensors")
    assert "does not say arch; give --arch" in script("export", tmp_path / "bare.safetensors", tmp_path / "b", code=2)
    given = FLAGS[name].removesuffix(" --tie").split()
    script("export", tmp_path / "bare.safetensors", tmp_path / "b", *given)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(logits(model), logits(back))


@pytest.mark.parametrize("pickled", [False, True])
def test_shards_and_pickles(there, tmp_path, pickled):
    name, model, ours = there
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB", safe_serialization=not pickled)
    assert len(list((tmp_path / "shards").glob("*-of-*"))) > 1
    script("import", tmp_path / "shards", tmp_path / "sharded.safetensors")
    x, y = load_file(ours), load_file(tmp_path / "sharded.safetensors")
    assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32(tmp_path, half):
    model = model_of(CONFIGS["llama"]).to(half)
    model.save_pretrained(tmp_path / "hf")
    script("import", tmp_path / "hf", tmp_path / "ours.safetensors")
    x = load_file(tmp_path / "ours.safetensors")["blocks.2.attention.k.weight"]
    assert x.dtype == torch.float32 and torch.equal(x, model.model.layers[2].self_attn.k_proj.weight.float())


def test_names_without_the_prefix(tmp_path):
    """The Hub's GPT-2 files were saved from the bare model, and carry its masks."""
    model = model_of(CONFIGS["gpt2"])
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    bare = {n.removeprefix("transformer."): x for n, x in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
    save_file(bare, tmp_path / "hf/model.safetensors")
    script("import", tmp_path / "hf", tmp_path / "ours.safetensors")
    assert torch.equal(load_file(tmp_path / "ours.safetensors")["wte.weight"], model.transformer.wte.weight)


REFUSED = [
    ("llama", "rms_norm_eps", 1e-6),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("llama", "rope_parameters", {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}),
    ("llama", "attention_bias", True),
    ("llama", "mlp_bias", True),
    ("llama", "hidden_act", "gelu"),
    ("llama", "head_dim", 16),
    ("llama", "num_key_value_heads", 4),
    ("llama", "model_type", "mistral"),
    ("llama", "vocab_size", 98),
    ("llama", "intermediate_size", 0),
    ("mixtral", "num_experts_per_tok", 1),
    ("mixtral", "num_experts_per_tok", 6),
    ("mixtral", "num_local_experts", 4),
    ("mixtral", "num_local_experts", 6),
    ("mixtral", "num_local_experts", None),
    ("mixtral", "rms_norm_eps", 1e-6),
    ("mixtral", "sliding_window", 16),
    ("mixtral", "intermediate_size", 48),
    ("mixtral", "model_type", "qwen2_moe"),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "layer_norm_epsilon", 1e-6),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "tie_word_embeddings", False),
    ("gpt2", "n_head", 5),
    ("gpt2", "n_layer", 4),
    ("gpt2", "n_layer", 2),
    ("gpt2", "n_embd", 96),
    ("gpt2", "n_positions", None),  # None: the key is missing
]
NAMED = {  # where the message speaks of something else than the key
    "num_experts_per_tok 1": "topk is 1,",
    "num_experts_per_tok 6": "topk is 6,",
    "num_local_experts 4": "experts.4.w1.weight has no place",
    "num_local_experts 6": "block_sparse_moe.experts.5.w1.weight is missing",
    "intermediate_size 48": "w1.weight",
    "rope_parameters": "rope_scaling",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "embed_tokens",
    "intermediate_size": "ffn",
    "n_head": "heads",
    "n_layer": "transformer.h.",
    "n_embd": "wte",
}


@pytest.mark.parametrize("name,key,value", REFUSED)
def test_what_our_model_cannot_hold_is_named(tmp_path, name, key, value):
    model_of(CONFIGS[name]).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config[key] = value
    if value is None:
        del config[key]
    path.write_text(json.dumps(config))
    said = script("import", tmp_path / "hf", tmp_path / "ours.safetensors", code=2)
    assert NAMED.get(f"{key} {value}", NAMED.get(key, key)) in said, said
    assert not (tmp_path / "ours.safetensors").exists()


def test_export_refuses_what_hugging_face_cannot_hold(there, tmp_path):
    name, _, ours = there
    tensors = load_file(ours)
    with hf.safe_open(ours, "pt") as f:
        meta = f.metadata()
    out = tmp_path / "out"
    more = tensors | {"blocks.0.mlp.router.balance": torch.zeros(5)}
    save_file(more, tmp_path / "extra.safetensors", metadata=meta)
    assert "blocks.0.mlp.router.balance has no place" in script("export", tmp_path / "extra.safetensors", out, code=2)
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "less.safetensors", metadata=meta)
    assert "norm.weight is missing" in script("export", tmp_path / "less.safetensors", out, code=2)
    (tmp_path / "short.safetensors").write_bytes(ours.read_bytes()[:-8])
    assert "short.safetensors" in script("export", tmp_path / "short.safetensors", out, code=2)
    assert "absent.safetensors" in script("export", tmp_path / "absent.safetensors", out, code=2)
    # From the shell, too.
    command = [sys.executable, ROOT / "dev/hf.py", "import", tmp_path / "absent", tmp_path / "x"]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 2 and r.stderr == f"hf.py: {tmp_path / 'absent/config.json'}: No such file or directory\n"
    if name == "gpt2":
        assert "kv_heads" in script("export", ours, out, "--kv-heads", 2, code=2)
    assert not out.exists()


NOT_MIXTRAL = [
    ("router", "sigmoid", "router is sigmoid"),
    ("shared_experts", 1, "shared_experts is 1"),
    ("moe_every", 2, "moe_every is 2"),
    ("route_nodes", 1, "route_nodes is 1 of 5"),
    ("topk", 1, "topk is 1,"),
    ("topk", 6, "topk is 6,"),
    ("arch", "gpt2", "arch is gpt2"),
    ("expert_ffn", 31, "experts.0.gate.weight"),
    ("experts", 4, "experts.4.down.weight has no place"),
    ("experts", "five", "five"),
]


@pytest.mark.parametrize("key,value,said", NOT_MIXTRAL)
def test_experts_that_mixtral_cannot_hold_are_named(tmp_path, key, value, said):
    model_of(CONFIGS["mixtral"]).save_pretrained(tmp_path / "hf")
    ours, other = tmp_path / "ours.safetensors", tmp_path / "other.safetensors"
    script("import", tmp_path / "hf", ours)
    with hf.safe_open(ours, "pt") as f:
        meta = f.metadata()
    save_file(load_file(ours), other, metadata=meta | {"route_groups": "5", "route_nodes": "5"})
    script("export", other, tmp_path / "groups that limit nothing")
    save_file(load_file(ours), other, metadata=meta | {"route_groups": "5", "route_nodes": "5", key: str(value)})
    assert said in script("export", other, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_balance_loss_is_that_of_mixtral(tmp_path):
    """Theirs is of one layer and one batch, and counts an expert's tokens where ours has its share of all k choices."""
    model = model_of(CONFIGS["mixtral"])
    model.save_pretrained(tmp_path / "hf")
    script("import", tmp_path / "hf", tmp_path / "ours.safetensors")
    ours = reference.load_model(tmp_path / "ours.safetensors")
    theirs = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    tokens = torch.from_numpy(np.random.RandomState(3).randint(0, 97, (4, 40)))
    with torch.no_grad():
        ours(tokens)
        layers = model(tokens, output_router_logits=True).router_logits  # [4 · 40, 5] each
        for router, x in zip(ours.routers(), layers, strict=True):
            mean = sum(theirs((one,), 5, 3).item() for one in x.split(40)) / 4 / 3
            assert mean > 1.001 and close(router.balance_loss().item(), mean, 1e-5)
