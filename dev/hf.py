#!/usr/bin/env python3
"""GPT-2, Llama and Mixtral between Hugging Face's directories and ours.

    python3 dev/hf.py import HF_DIR out.safetensors            prints the flags that ./train needs for this model
    python3 dev/hf.py export weights.safetensors HF_DIR        a directory that transformers' from_pretrained reads

The two formats hold the same numbers under other names; nothing is computed, so there and back gives the same bits:

    Hugging Face GPT-2          ours                        what differs
    h.0.attn.c_attn.weight      blocks.0.attention.q|k|v    Conv1D keeps [in, out], we keep [out, in]; q, k, v are one
    h.0.mlp.c_fc.weight         blocks.0.mlp.up             [in, out] again
    Llama's q_proj, k_proj      blocks.0.attention.q|k      nothing: both turn channels i and i + D/2 together (RoPE)
    Mixtral's experts.0.w1|3|2  ...experts.0.gate|up|down   nothing; its intermediate_size is our expert_ffn

A Mixtral is our llama with experts in every block, softmax scores and two experts a token or more (it divides even a
single gate by itself, and we do not). What else our experts can be, it cannot hold.

Half-precision files become fp32. A model with anything that ./train cannot compute is refused, and what it is is named.
Needs PyTorch and safetensors.
"""

import argparse
import json
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INTEGERS = ("layers", "heads", "kv_heads", "hidden", "ffn", "vocab", "seq")
OF_EXPERTS = ("experts", "topk", "expert_ffn")  # 0 where a model has none
NOT_MIXTRAL = {"router": "softmax", "shared_experts": "0", "moe_every": "1"}  # and its values that Mixtral has


def refuse(message):
    print(f"hf.py: {message}", file=sys.stderr)
    sys.exit(2)


# ---- names: (ours, theirs, how ours follows from theirs) -----------------------------------------------------------
def table(c):
    """Rows (ours, theirs, kind): "same", "transposed", or ("third", n): the n-th third of a transposed c_attn."""
    rows = []

    def row(ours, theirs, kind="same", biases=False):
        rows.append((f"{ours}.weight", f"{theirs}.weight", kind))
        if biases:
            rows.append((f"{ours}.bias", f"{theirs}.bias", kind))

    if c["arch"] == "gpt2":
        row("wte", "transformer.wte")
        row("wpe", "transformer.wpe")
        for l in range(c["layers"]):
            ours, theirs = f"blocks.{l}", f"transformer.h.{l}"
            row(f"{ours}.norm1", f"{theirs}.ln_1", biases=True)
            for n, part in enumerate("qkv"):
                row(f"{ours}.attention.{part}", f"{theirs}.attn.c_attn", ("third", n), biases=True)
            row(f"{ours}.attention.out", f"{theirs}.attn.c_proj", "transposed", biases=True)
            row(f"{ours}.norm2", f"{theirs}.ln_2", biases=True)
            row(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", "transposed", biases=True)
            row(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", "transposed", biases=True)
        row("norm", "transformer.ln_f", biases=True)
        return rows

    row("wte", "model.embed_tokens")
    for l in range(c["layers"]):
        ours, theirs = f"blocks.{l}", f"model.layers.{l}"
        row(f"{ours}.norm1", f"{theirs}.input_layernorm")
        for part, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj")):
            row(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}")
        row(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
        if c["experts"]:
            row(f"{ours}.mlp.router", f"{theirs}.block_sparse_moe.gate")
            for e in range(c["experts"]):
                for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                    row(f"{ours}.mlp.experts.{e}.{part}", f"{theirs}.block_sparse_moe.experts.{e}.{name}")
        else:
            for part in ("gate", "up", "down"):
                row(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj")
    row("norm", "model.norm")
    if not c["tie"]:
        row("head", "lm_head")
    return rows


def shape(name, c):
    """The shape of one of our tensors; weights are [out, in]."""
    C, F, V, D = c["hidden"], c["expert_ffn"] or c["ffn"], c["vocab"], c["hidden"] // c["heads"]
    module, what = name.rsplit(".", 2)[-2:]
    weight = {
        "wte": (V, C),
        "head": (V, C),
        "wpe": (c["seq"], C),
        "q": (c["heads"] * D, C),
        "k": (c["kv_heads"] * D, C),
        "v": (c["kv_heads"] * D, C),
        "out": (C, c["heads"] * D),
        "gate": (F, C),
        "up": (F, C),
        "down": (C, F),
        "router": (c["experts"], C),
    }.get(module, (C,))
    return weight if what == "weight" else weight[:1]


def check_shape(where, name, x, expected):
    if tuple(x.shape) != expected:
        refuse(f"{where}: {name} is {list(x.shape)}, and the configuration makes it {list(expected)}")


# ---- configurations ------------------------------------------------------------------------------------------------
# What changes the model: (key, its value where config.json is silent, the values that ./train computes).
GPT2_FIXED = [
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    ("layer_norm_epsilon", 1e-5, (1e-5,)),
    ("scale_attn_weights", True, (True,)),
    ("scale_attn_by_inverse_layer_idx", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("tie_word_embeddings", True, (True,)),
]
LLAMA_FIXED = [
    ("hidden_act", "silu", ("silu", "swish")),
    ("rms_norm_eps", 1e-6, (1e-5,)),
    ("rope_scaling", None, (None,)),
    ("attention_bias", False, (False,)),
    ("mlp_bias", False, (False,)),
    ("partial_rotary_factor", 1.0, (1.0,)),
    ("sliding_window", None, (None,)),
]
MIXTRAL_FIXED = [(k, {"rms_norm_eps": 1e-5}.get(k, silent), known) for k, silent, known in LLAMA_FIXED]
FIXED = {"gpt2": GPT2_FIXED, "llama": LLAMA_FIXED, "mixtral": MIXTRAL_FIXED}


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        refuse(f"{path}: {e.strerror if isinstance(e, OSError) else f'not JSON ({e})'}")


def config_from_hf(path):
    """Our configuration from theirs. transformers 5 has RoPE's numbers in rope_parameters, earlier ones do not."""
    h = read_json(path)
    kind = h.get("model_type")
    if kind not in FIXED:
        refuse(f"{path}: model_type is {kind}, and ./train knows {', '.join(FIXED)}")
    rope = h.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        h["rope_scaling"] = rope
    for key, silent, known in FIXED[kind]:
        value = h.get(key, silent)
        if value not in known:
            refuse(f"{path}: {key} is {json.dumps(value)}, and ./train has {json.dumps(known[0])}")
    c = dict.fromkeys(OF_EXPERTS, 0)
    try:
        if kind == "gpt2":
            c.update(layers=h["n_layer"], heads=h["n_head"], kv_heads=h["n_head"], hidden=h["n_embd"])
            c.update(ffn=h.get("n_inner") or 4 * h["n_embd"], seq=h["n_positions"], rope_theta=10000.0, tie=True)
        else:
            c.update(layers=h["num_hidden_layers"], heads=h["num_attention_heads"], hidden=h["hidden_size"])
            c.update(kv_heads=h.get("num_key_value_heads") or c["heads"], ffn=h["intermediate_size"])
            c.update(seq=h["max_position_embeddings"], tie=bool(h.get("tie_word_embeddings", False)))
            silent = 1e6 if kind == "mixtral" else 10000.0
            c.update(rope_theta=float(rope.get("rope_theta", h.get("rope_theta", silent))))
        if kind == "mixtral":
            c.update(experts=h["num_local_experts"], topk=h["num_experts_per_tok"], expert_ffn=c["ffn"])
        c.update(arch="gpt2" if kind == "gpt2" else "llama", vocab=h["vocab_size"])
    except KeyError as e:
        refuse(f"{path}: {e.args[0]} is missing")
    check_sizes(path, c, mixtral=kind == "mixtral")
    if h.get("head_dim") not in (None, c["hidden"] // c["heads"]):
        refuse(f"{path}: head_dim is {h['head_dim']}, and ./train has hidden / heads = {c['hidden'] // c['heads']}")
    return c


def check_sizes(where, c, mixtral):
    for key in (*INTEGERS, *(OF_EXPERTS if mixtral else ())):
        if not isinstance(c[key], int) or c[key] < 1:
            refuse(f"{where}: {key} is {c[key]}, and must be a whole number from 1")
    if c["hidden"] % c["heads"]:
        refuse(f"{where}: hidden {c['hidden']} is not divisible by heads {c['heads']}")
    if c["heads"] % c["kv_heads"]:
        refuse(f"{where}: heads {c['heads']} is not divisible by kv_heads {c['kv_heads']}")
    if mixtral and c["topk"] == 1:
        refuse(f"{where}: topk is 1, where a Mixtral's gate is 1, and that of ./train is the expert's score")
    if mixtral and c["topk"] > c["experts"]:
        refuse(f"{where}: topk is {c['topk']}, and there are {c['experts']} experts")


def check_mixtral(where, c, meta):
    """Refuses experts of ours that a Mixtral cannot have."""
    if c["arch"] != "llama":
        refuse(f"{where}: arch is {c['arch']}, and Hugging Face's Mixtral is a llama with experts")
    for key, has in NOT_MIXTRAL.items():
        if meta.get(key, has) != has:
            refuse(f"{where}: {key} is {meta[key]}, and Hugging Face's Mixtral has {has}")
    groups, nodes = meta.get("route_groups", "1"), meta.get("route_nodes", "1")
    if groups != nodes:
        refuse(f"{where}: route_nodes is {nodes} of {groups}, and Hugging Face's Mixtral chooses from all experts")


def config_to_hf(c):
    # Which tokens begin and end a text is the tokenizer's matter, and we have none; GPT-2's is known by its size.
    end = 50256 if (c["arch"], c["vocab"]) == ("gpt2", 50257) else None
    kind = "mixtral" if c["experts"] else c["arch"]
    common = {"model_type": kind, "vocab_size": c["vocab"], "bos_token_id": end, "eos_token_id": end}
    common.update(torch_dtype="float32", tie_word_embeddings=c["tie"])
    if c["arch"] == "gpt2":
        if c["kv_heads"] != c["heads"]:
            refuse(f"kv_heads is {c['kv_heads']}, and Hugging Face's GPT-2 has one for each of the {c['heads']} heads")
        if not c["tie"]:
            refuse("there is a head.weight, and Hugging Face's GPT-2 shares its head with its embedding")
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": c["layers"],
            "n_head": c["heads"],
            "n_embd": c["hidden"],
            "n_inner": c["ffn"],
            "n_positions": c["seq"],
            "n_ctx": c["seq"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    if c["experts"]:
        common.update(num_local_experts=c["experts"], num_experts_per_tok=c["topk"], sliding_window=None)
    return common | {
        "architectures": ["MixtralForCausalLM" if c["experts"] else "LlamaForCausalLM"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "hidden_size": c["hidden"],
        "intermediate_size": c["expert_ffn"] or c["ffn"],
        "max_position_embeddings": c["seq"],
        "rope_theta": c["rope_theta"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def flags(c):
    """As ./train wants them; a gpt2's head is always tied, and it has no RoPE."""
    text = f"--arch {c['arch']} " + " ".join(f"--{k.replace('_', '-')} {c[k]}" for k in INTEGERS)
    if c["arch"] == "llama":
        text += f" --rope-theta {c['rope_theta']:.17g}" + (" --tie" if c["tie"] else "")
    if c["experts"]:
        text += "".join(f" --{k.replace('_', '-')} {c[k]}" for k in OF_EXPERTS)
    return text


# ---- files ---------------------------------------------------------------------------------------------------------
def read_tensors(path):
    """({name: tensor}, metadata) of a safetensors file, or of a pickle, which is loaded without running its code."""
    try:
        if path.suffix == ".bin":
            return torch.load(path, map_location="cpu", weights_only=True), {}
        with safe_open(path, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
    except Exception as e:  # either package has errors of its own
        refuse(f"cannot read {path}: {getattr(e, 'strerror', None) or str(e).splitlines()[0]}")


def read_hf_tensors(directory):
    """One file, or the shards that an index lists; safetensors before pickles."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        files = [directory / name] if (directory / name).exists() else []
        if not files and index.exists():
            files = [directory / f for f in sorted(set(read_json(index)["weight_map"].values()))]
        tensors = {}
        for file in files:
            tensors.update(read_tensors(file)[0])
        if files:
            return tensors
    refuse(f"{directory} has neither model.safetensors nor pytorch_model.bin, nor an index of either")


def import_hf(directory, out):
    c = config_from_hf(directory / "config.json")
    theirs = read_hf_tensors(directory)
    base = "transformer." if c["arch"] == "gpt2" else "model."
    head = theirs.get("lm_head.weight")
    theirs = {n if n.startswith(base) or n == "lm_head.weight" else base + n: x for n, x in theirs.items()}
    rows = table(c)
    wte_name = rows[0][1]
    missing = sorted({t for _, t, _ in rows} - set(theirs))
    if missing:
        refuse(f"{directory}: {missing[0]} is missing")
    # Masks and frequencies that old versions stored; a tied head, stored again.
    rest = set(theirs) - {t for _, t, _ in rows}
    rest -= {n for n in rest if n.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))}
    if head is not None and c["tie"]:
        rest.discard("lm_head.weight")
        if not torch.equal(head, theirs[wte_name]):
            refuse(f"{directory}: lm_head.weight differs from {wte_name}, and the configuration says that they are one")
    if rest:
        refuse(f"{directory}: {sorted(rest)[0]} has no place in a {c['arch']} of ./train")
    ours = {}
    for name, their, kind in rows:
        x = theirs[their]
        if not x.is_floating_point():
            refuse(f"{directory}: {their} is {x.dtype}; quantized weights have no place in ./train")
        if isinstance(kind, tuple):
            check_shape(directory, their, x, (*x.shape[:-1], 3 * c["hidden"]))
            x = x.chunk(3, dim=-1)[kind[1]]
        if kind != "same" and x.ndim == 2:
            x = x.t()
        check_shape(directory, f"{their} (our {name})", x, shape(name, c))
        ours[name] = x.float().clone(memory_format=torch.contiguous_format)
    meta = {k: str(c[k]) for k in ("arch", *INTEGERS)}
    meta.update(tie="01"[c["tie"]], rope_theta=f"{c['rope_theta']:.17g}")
    if c["experts"]:
        meta.update({k: str(c[k]) for k in OF_EXPERTS}, route_groups="1", route_nodes="1", **NOT_MIXTRAL)
    save_file(ours, out, metadata=meta)
    print(flags(c) + f" --init {out}")


def export_hf(weights, directory, given):
    ours, meta = read_tensors(weights)
    c = {k: meta.get(k) for k in ("arch", *INTEGERS, "rope_theta")} | {k: meta.get(k, 0) for k in OF_EXPERTS} | given
    if c["arch"] == "gpt2":
        c["rope_theta"] = 0  # it has none
    unknown = [k for k in c if c[k] is None]
    if unknown:
        refuse(f"{weights} does not say {unknown[0]}; give --{unknown[0].replace('_', '-')}")
    if c["arch"] not in ("gpt2", "llama"):
        refuse(f"{weights}: arch is {c['arch']}, and this script knows gpt2 and llama")
    try:
        c.update({k: int(c[k]) for k in (*INTEGERS, *OF_EXPERTS)})
        c.update(rope_theta=float(c["rope_theta"]), tie="head.weight" not in ours)
    except ValueError as e:
        refuse(f"{weights}: {e}")
    if c["experts"]:
        check_mixtral(weights, c, meta)
    check_sizes(weights, c, mixtral=c["experts"] != 0)
    config, rows = config_to_hf(c), table(c)
    names = {name for name, _, _ in rows}
    for name in sorted(names ^ set(ours)):
        wrong = "is missing" if name in names else f"has no place in Hugging Face's {config['model_type']}"
        refuse(f"{weights}: {name} {wrong}")
    theirs = {}
    for name, their, kind in rows:
        check_shape(weights, name, ours[name], shape(name, c))
        x = ours[name].t() if kind != "same" and ours[name].ndim == 2 else ours[name]
        theirs[their] = torch.cat([theirs[their], x], -1) if their in theirs else x
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    theirs = {name: x.contiguous() for name, x in theirs.items()}
    save_file(theirs, directory / "model.safetensors", metadata={"format": "pt"})
    print(f"from_pretrained({str(directory)!r}) reads it: {sum(x.numel() for x in theirs.values()):,} values")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="GPT-2, Llama and Mixtral between Hugging Face's directories and ours")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("import", help="a Hugging Face directory becomes a weights file of ours")
    p.add_argument("directory", type=pathlib.Path)
    p.add_argument("out", type=pathlib.Path)
    p = commands.add_parser("export", help="a weights file of ours becomes a Hugging Face directory")
    p.add_argument("weights", type=pathlib.Path)
    p.add_argument("directory", type=pathlib.Path)
    p.add_argument("--arch", choices=("gpt2", "llama"), help="this and the rest: only where the file does not say")
    for key in (*INTEGERS, *OF_EXPERTS):
        p.add_argument(f"--{key.replace('_', '-')}", type=int)
    p.add_argument("--rope-theta", type=float)
    args = parser.parse_args(arguments)
    if args.command == "import":
        import_hf(args.directory, args.out)
    else:
        given = {k: getattr(args, k) for k in ("arch", *INTEGERS, *OF_EXPERTS, "rope_theta")}
        export_hf(args.weights, args.directory, {k: v for k, v in given.items() if v is not None})


if __name__ == "__main__":
    main()
