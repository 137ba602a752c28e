#!/usr/bin/env python3
"""Text to token shards, which ./train reads with --data.

    tokenize_text.py notes.txt --out data/notes --train-vocab 8192         learns a vocabulary from the text itself
    tokenize_text.py *.jsonl --out data/web --tokenizer tokenizer.json     takes one from a file
    tokenize_text.py notes.txt --out data/notes                            downloads GPT-2's

Byte-pair encoding starts from the 256 bytes and, again and again, gives the most frequent pair of neighbours a token of
its own (Sennrich et al., 2016); the work is done by Hugging Face's `tokenizers`. A .jsonl file holds a document a line
({"text": "..."}), any other file is one document. Each document begins with the end-of-text token.

A shard is llm.c's: 256 int32 (magic, version, number of tokens, zeros), then the tokens, uint16 where the vocabulary
fits (magic 20240520, version 1), else uint32 (magic 20240801, version 7). The first --val-tokens tokens go to
PREFIX_val_000000.bin, the others to PREFIX_train_000001.bin and on; the vocabulary to PREFIX_tokenizer.json.

(The file is not called tokenize.py: Python's own module of that name would be hidden by it.)
"""
import argparse
import glob
import json
import os
import re
import sys
import urllib.request

END_OF_TEXT = ["<|endoftext|>", "<|end_of_text|>", "</s>"]  # GPT-2 and ours; Llama 3; Llama 1 and 2
PIECE = 1 << 20  # characters encoded at once
BATCH = 64       # pieces


def fail(message):
    print(f"tokenize_text.py: {message}", file=sys.stderr)
    sys.exit(2)


try:
    import numpy as np
    import tokenizers
except ImportError as missing:
    fail(f"needs the Python package {missing.name}: pip install {missing.name}")


def read(name):
    try:
        # newline="": a carriage return is text like any other
        with open(name, encoding="utf-8", newline="") as file:
            yield from enumerate(file, 1) if name.endswith(".jsonl") else [(0, file.read())]
    except OSError as error:
        fail(f"cannot read {name}: {error.strerror}")
    except UnicodeDecodeError as error:
        fail(f"{name} is not UTF-8 text: {error.reason}")


def documents(names):
    for name in names:
        for line, text in read(name):
            if line:
                try:
                    text = json.loads(text)["text"]
                    text.encode()  # a string, and no half of a surrogate pair
                except (ValueError, KeyError, TypeError, AttributeError):
                    fail(f'{name}, line {line}: not {{"text": "..."}}')
            yield text


def pieces(text):
    """Cuts a long text at ends of lines where GPT-2's and Llama 3's rules cut too, so that its tokens stay the same."""
    end_of_line = re.compile(r"(?<=\S\n)(?=\S)")
    start = 0
    while cut := end_of_line.search(text, start + PIECE):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def train(names, vocab):
    if vocab < 257:
        fail(f"--train-vocab {vocab}: 256 bytes and the end-of-text token need 257")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=END_OF_TEXT[:1],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p for text in documents(names) for p in pieces(text)), trainer)
    return tokenizer


def load(name):
    if os.path.exists(name) or name.endswith(".json"):
        try:
            return tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # the library raises nothing narrower
            fail(f"cannot load --tokenizer {name}: {error}")
    # Not the library's own download: without a network that one tries for half a minute.
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/{name}/resolve/main/tokenizer.json"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return tokenizers.Tokenizer.from_str(answer.read().decode())
    except Exception as error:  # no network, no such name, not public, not a tokenizer
        fail(
            f"cannot download {url} ({error}): get it elsewhere and give its path, --tokenizer PATH/tokenizer.json, "
            "or learn a vocabulary from the text, --train-vocab 8192"
        )


def encode(tokenizer, names):
    """Yields arrays of tokens, in order; several pieces are encoded at once, on all cores."""
    end_of_text = next((t for t in map(tokenizer.token_to_id, END_OF_TEXT) if t is not None), None)
    if end_of_text is None:
        fail(f"the tokenizer has no end-of-text token: none of {' '.join(END_OF_TEXT)}")
    tokenizer.encode_special_tokens = True  # a text that speaks of <|endoftext|> does not end there
    batch = []  # (is this the beginning of a document, piece)

    def encoded():
        for (begins, _), e in zip(batch, tokenizer.encode_batch([p for _, p in batch], add_special_tokens=False)):
            yield np.array([end_of_text] * begins + e.ids, dtype=np.uint32)
        batch.clear()

    for text in documents(names):
        for i, piece in enumerate(pieces(text)):
            batch.append((i == 0, piece))
            if len(batch) == BATCH:
                yield from encoded()
    yield from encoded()


def write_shard(name, tokens, vocab):
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240520, 1, len(tokens)) if vocab <= 65536 else (20240801, 7, len(tokens))
    with open(name + ".part", "wb") as file:  # a run that is stopped leaves no half shard behind
        header.tofile(file)
        tokens.astype("<u2" if vocab <= 65536 else "<u4").tofile(file)
    os.replace(name + ".part", name)
    print(f"{name}: {len(tokens):,} tokens")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="text (.txt) or a document a line (.jsonl)")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="the shards' names up to _train_000001.bin")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", default="gpt2", metavar="FILE|NAME", help="tokenizer.json, or a name to download")
    which.add_argument("--train-vocab", type=int, metavar="N", help="learn N tokens from the text")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens a shard (10⁸)")
    parser.add_argument("--val-tokens", type=int, default=0, metavar="N", help="tokens for the validation shard (0)")
    args = parser.parse_args()
    if not 0 < args.shard_tokens < 2**31:
        fail(f"--shard-tokens {args.shard_tokens} is not in 1 .. {2**31 - 1}, what a shard's header can say")
    if not 0 <= args.val_tokens < 2**31:
        fail(f"--val-tokens {args.val_tokens} is not in 0 .. {2**31 - 1}, what a shard's header can say")

    if old := glob.glob(f"{glob.escape(args.out)}_*_[0-9]*.bin"):
        fail(f"{old[0]} exists: remove the earlier shards or choose another --out, lest the two mix")

    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    tokenizer = load(args.tokenizer) if args.train_vocab is None else train(args.files, args.train_vocab)
    tokenizer.save(f"{args.out}_tokenizer.json")
    vocab = max(tokenizer.get_vocab().values()) + 1
    if args.train_vocab and vocab < args.train_vocab:
        print(f"the text has pairs for {vocab:,} tokens only, not {args.train_vocab:,}")

    shard, limit = (0, args.val_tokens) if args.val_tokens else (1, args.shard_tokens)
    waiting, n_waiting = [], 0  # tokens of the shard to come

    def write(tokens):
        write_shard(f"{args.out}_{'train' if shard else 'val'}_{shard:06d}.bin", tokens, vocab)

    for tokens in encode(tokenizer, args.files):
        waiting.append(tokens)
        n_waiting += len(tokens)
        while n_waiting >= limit:
            tokens = np.concatenate(waiting)
            write(tokens[:limit])
            waiting, n_waiting = [tokens[limit:]], n_waiting - limit
            shard, limit = shard + 1, args.shard_tokens
    if shard == 0 or shard == 1 and n_waiting == 0:
        held_out = n_waiting + shard * args.val_tokens
        fail(f"nothing to train on: the text has {held_out} tokens, --val-tokens {args.val_tokens}")
    if n_waiting:
        write(np.concatenate(waiting))
    val = f" --val {args.out}_val_000000.bin" if args.val_tokens else ""
    print(f"./train --data {args.out}_train_*.bin{val} --vocab {vocab}")


if __name__ == "__main__":
    main()
