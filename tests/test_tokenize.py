"""dev/data: shards that tokenize_text.py writes, read by the C loader; downloads, and what is said without a network."""
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from conftest import ROOT, make, make_text

DATA = ROOT / "dev/data"
NO_NETWORK = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}


def run(*command, env=None, cwd=None):
    env = {**os.environ, **(env or {})}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


def tokenize(*arguments, env=None):
    return run(sys.executable, DATA / "tokenize_text.py", *arguments, env=env)


def assert_refused(r, *words):
    assert r.returncode == 2, r
    assert r.stderr.count("\n") == 1 and r.stderr.endswith("\n"), r.stderr
    for word in words:
        assert word in r.stderr, r.stderr


def read_shard(path):
    """(tokens, bytes a token), by the description of the format."""
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    width = {(20240520, 1): 2, (20240801, 7): 4}[tuple(header[:2])]
    assert not header[3:].any()
    tokens = np.frombuffer(raw[1024:], f"<u{width}")
    assert len(tokens) == header[2]
    return tokens.tolist(), width


@pytest.fixture(scope="session")
def loader():
    """The C loader, as a program that prints the tokens of each window: see tests/test_data.c."""
    return make("build/cpu-fp32/tests/test_data")


def load(loader, T, *files):
    r = run(loader, T, *files)
    assert r.returncode == 0, r
    vocab, *windows = r.stdout.splitlines()
    return int(vocab), [int(t) for w in windows for t in w.split()]


# ---- tokenize_text.py ---------------------------------------------------------------------------------------------
def test_shards_hold_the_text(tmp_path, loader):
    tokenizers = pytest.importorskip("tokenizers")
    text = make_text(40_000, seed=1).decode() + "é ✓ \r\n\n  <|endoftext|> is but a word here\n"
    (tmp_path / "a.txt").write_text(text, newline="")
    documents = ["one", "", "two\nlines"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": d, "id": 1}) + "\n" for d in documents))
    out = tmp_path / "made/here"
    r = tokenize(tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", out, "--train-vocab", 500,
                 "--val-tokens", 1000, "--shard-tokens", 4000)  # fmt: skip
    assert r.returncode == 0, r
    val, *train = sorted((tmp_path / "made").glob("here_*_*.bin"), key=lambda p: p.name.split("_")[-1])
    assert val.name == "here_val_000000.bin"
    assert [p.name for p in train] == [f"here_train_{i:06d}.bin" for i in range(1, len(train) + 1)]
    sizes = [len(read_shard(p)[0]) for p in [val, *train]]
    assert sizes[0] == 1000 and set(sizes[1:-1]) == {4000} and 0 < sizes[-1] <= 4000 and len(sizes) >= 4

    # Back to text, through the tokenizer that was saved: nothing lost, a document after each end-of-text token.
    tokens = [t for p in [val, *train] for t in read_shard(p)[0]]
    tokenizer = tokenizers.Tokenizer.from_file(f"{out}_tokenizer.json")
    assert tokenizer.get_vocab_size() == 500 and max(tokens) < 500
    end = tokenizer.token_to_id("<|endoftext|>")
    starts = [i for i, t in enumerate(tokens) if t == end]
    assert starts[0] == 0
    found = [tokenizer.decode(tokens[i + 1 : j]) for i, j in zip(starts, [*starts[1:], None])]
    assert found == [text, *documents]

    # The program's loader sees the same numbers: T inputs a window.
    for shard in [val, *train]:
        ids, width = read_shard(shard)
        assert width == 2
        assert load(loader, 16, shard) == (50257, ids[: (len(ids) - 1) // 16 * 16])
    assert f"--data {out}_train_*.bin --val {val} --vocab 500" in r.stdout


def word_tokenizer(path, words):
    """A tokenizer whose token of the i-th word is i."""
    tokenizers = pytest.importorskip("tokenizers")
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    t.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    t.save(str(path))


@pytest.mark.parametrize("vocab, width", [(65536, 2), (65537, 4)])
def test_the_width_follows_the_vocabulary(tmp_path, loader, vocab, width):
    words = [f"w{i}" for i in range(vocab)]
    words[1] = "<|end_of_text|>"
    word_tokenizer(tmp_path / "tokenizer.json", words)
    ids = [2, 3, 255, 256, 32767, 32768, vocab - 1, 5]
    (tmp_path / "a.txt").write_text(" ".join(words[i] for i in ids))
    r = tokenize(tmp_path / "a.txt", "--out", tmp_path / "o", "--tokenizer", tmp_path / "tokenizer.json")
    assert r.returncode == 0, r
    assert read_shard(tmp_path / "o_train_000001.bin") == ([1, *ids], width)
    implied = {2: 50257, 4: 128256}[width]
    assert load(loader, 4, tmp_path / "o_train_000001.bin") == (implied, [1, *ids[:-1]])


def test_pieces_do_not_change_the_tokens(monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(str(DATA))
    import tokenize_text

    monkeypatch.setattr(tokenize_text, "PIECE", 50)

    text = re.sub(r"\n", lambda m: "\n" * (1 + m.start() % 3), make_text(60_000, seed=2).decode())
    text += "\n \t\n  x\n\n\ny\r\n\r\nz"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    for rule in byte_level(add_prefix_space=False), tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex(llama3), "isolated"), byte_level(False, use_regex=False)]
    ):
        tokenizer.pre_tokenizer = rule
        tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False))
        whole, parts = tokenizer.encode(text).ids, list(tokenize_text.pieces(text))
        assert len(parts) > 200 and "".join(parts) == text
        assert [t for p in parts for t in tokenizer.encode(p).ids] == whole


def test_what_tokenize_refuses(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    (tmp_path / "junk.json").write_text("{}")
    word_tokenizer(tmp_path / "no_end.json", ["a", "b"])
    a, out = tmp_path / "a.txt", ("--out", tmp_path / "o")
    learn = ("--train-vocab", 300)
    assert_refused(tokenize(tmp_path / "absent.txt", *out, *learn), "absent.txt: No such file or directory")
    assert_refused(tokenize(tmp_path, *out, *learn), f"{tmp_path}: Is a directory")
    assert_refused(tokenize(tmp_path / "bytes.txt", *out, *learn), "bytes.txt is not UTF-8")
    assert_refused(tokenize(tmp_path / "bad.jsonl", *out, *learn), "bad.jsonl, line 2")
    assert_refused(tokenize(a, *out, "--train-vocab", 256), "--train-vocab 256", "257")
    assert_refused(tokenize(a, *out, *learn, "--shard-tokens", 0), "--shard-tokens 0")
    assert_refused(tokenize(a, *out, *learn, "--val-tokens", 10**6), "nothing to train on", "1000000")
    assert_refused(tokenize(a, *out, "--tokenizer", tmp_path / "absent.json"), "cannot load --tokenizer", "absent.json")
    assert_refused(tokenize(a, *out, "--tokenizer", tmp_path / "junk.json"), "cannot load --tokenizer", "junk.json")
    assert_refused(tokenize(a, *out, "--tokenizer", tmp_path / "no_end.json"), "no end-of-text token")
    assert not list(tmp_path.glob("*.bin*"))
    assert tokenize(a, *out, *learn).returncode == 0
    assert_refused(tokenize(a, *out, *learn), "o_train_000001.bin exists")


def test_tokenize_without_its_library(tmp_path):
    (tmp_path / "tokenizers.py").write_text("raise ModuleNotFoundError(name='tokenizers')")
    r = tokenize("a.txt", "--out", tmp_path / "o", env={"PYTHONPATH": str(tmp_path)})
    assert_refused(r, "pip install tokenizers")


def test_tokenize_without_a_network(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("words")
    r = tokenize(tmp_path / "a.txt", "--out", tmp_path / "o", env=NO_NETWORK)
    assert_refused(r, "cannot download", "gpt2", "--tokenizer PATH/tokenizer.json", "--train-vocab")


def test_tokenize_downloads_by_name(tmp_path, hub):
    word_tokenizer(tmp_path / "hub/some/name/resolve/main/tokenizer.json", ["x", "<|endoftext|>", "be", "to"])
    (tmp_path / "a.txt").write_text("to be to")
    r = tokenize(tmp_path / "a.txt", "--out", tmp_path / "o", "--tokenizer", "some/name", env=hub)
    assert r.returncode == 0, r
    assert read_shard(tmp_path / "o_train_000001.bin") == ([1, 3, 2, 3], 2)


# ---- the scripts that download --------------------------------------------------------------------------------------
REPO = "karpathy/fineweb-edu-100B-gpt2-token-shards"


class Hub(http.server.SimpleHTTPRequestHandler):
    """Serves files and, unlike its base, parts of them: what a resumed download asks for."""

    def do_GET(self):
        asked = re.match(r"bytes=(\d+)-$", self.headers.get("Range", "bytes=0-"))
        self.server.asked.append((self.path.split("/")[-1], int(asked[1])))
        try:
            body = open(self.translate_path(self.path), "rb").read()
        except OSError:
            return self.send_error(404)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(body) - int(asked[1])))
        self.send_header("Content-Range", f"bytes {asked[1]}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        self.wfile.write(body[int(asked[1]) :])

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment that makes the scripts take tmp_path/hub for the Hugging Face hub; Hub.asked: what they asked."""
    for name in "some/name", f"datasets/{REPO}":
        (tmp_path / "hub" / name / "resolve/main").mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Hub(*a, directory=str(tmp_path / "hub"))
    )
    server.asked = Hub.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"}
    server.shutdown()
    server.server_close()


def write_shard(path, n, seed):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, n
    path.write_bytes(header.tobytes() + np.random.default_rng(seed).integers(0, 50257, n).astype("<u2").tobytes())


def test_fineweb_resumes_and_checks(tmp_path, hub):
    remote, out = tmp_path / f"hub/datasets/{REPO}/resolve/main", tmp_path / "out"
    names = ["edu_fineweb_val_000000.bin", "edu_fineweb_train_000001.bin", "edu_fineweb_train_000002.bin"]
    for i, name in enumerate(names):
        write_shard(remote / name, 3000 + i, i)
    fetch = lambda n: run(DATA / "fineweb.sh", "--shards", n, "--out", out, env=hub)
    r = fetch(1)
    assert r.returncode == 0, r
    assert sorted(p.name for p in out.iterdir()) == sorted(names[:2])

    # The second time: what is whole is left alone, and what was cut off goes on where it stopped.
    (out / f"{names[2]}.part").write_bytes((remote / names[2]).read_bytes()[:2000])
    Hub.asked.clear()
    assert fetch(2).returncode == 0
    assert Hub.asked == [(names[2], 2000)]
    for name in names:
        assert (out / name).read_bytes() == (remote / name).read_bytes()

    (out / names[1]).write_bytes(b"half")  # is fetched anew
    write_shard(remote / "edu_fineweb_train_000003.bin", 100, 3)
    with open(remote / "edu_fineweb_train_000003.bin", "ab") as f:
        f.write(b"too much")
    assert_refused(fetch(3), "edu_fineweb_train_000003.bin.part is not a whole shard")
    assert (out / names[1]).read_bytes() == (remote / names[1]).read_bytes()
    assert_refused(fetch(4), "train_000003")
    os.remove(out / "edu_fineweb_train_000003.bin.part")
    os.remove(remote / "edu_fineweb_train_000003.bin")
    assert_refused(fetch(3), "cannot download", "404", "--from DIR")


def test_fineweb_from_a_directory(tmp_path, loader):
    here, out = tmp_path / "here", tmp_path / "out"
    here.mkdir()
    write_shard(here / "edu_fineweb_val_000000.bin", 100, 0)
    write_shard(here / "edu_fineweb_train_000001.bin", 100, 1)
    fetch = lambda *more: run(DATA / "fineweb.sh", "--out", out, "--from", "here", *more, cwd=tmp_path, env=NO_NETWORK)
    assert fetch().returncode == 0
    ids, _ = read_shard(here / "edu_fineweb_train_000001.bin")
    assert load(loader, 33, out / "edu_fineweb_train_000001.bin") == (50257, ids[:99])
    assert_refused(fetch("--shards", 2), "edu_fineweb_train_000002.bin is missing")
    assert_refused(fetch("--from", tmp_path / "nowhere"), "--from", "is not a directory")


def test_fineweb_refuses(tmp_path):
    fineweb = lambda *more: run(DATA / "fineweb.sh", "--out", tmp_path, *more, env=NO_NETWORK)
    assert_refused(fineweb(), "cannot download", REPO, "--from DIR")
    for n in "0", "1002", "99999999999999999999", "abc", "-1", "":
        assert_refused(fineweb("--shards", n), "--shards takes a number in 1 .. 1001")
    assert_refused(fineweb("--shards"), "--shards")
    assert_refused(fineweb("--shard", "3"), "--shard is unknown")
    assert not list(tmp_path.glob("*.bin"))


@pytest.fixture
def tinyshakespeare(tmp_path):
    """A copy of the script in a tree of its own, since it writes to the data/ of the tree it stands in."""
    (tmp_path / "dev/data").mkdir(parents=True)
    script = shutil.copy(DATA / "tinyshakespeare.sh", tmp_path / "dev/data")
    return lambda *more: run(script, *more, env=NO_NETWORK)


def test_tinyshakespeare_refuses(tmp_path, tinyshakespeare):
    assert_refused(tinyshakespeare(), "cannot download", "tinyshakespeare.sh FILE")
    assert_refused(tinyshakespeare(tmp_path / "absent"), "absent is not a file")
    (tmp_path / "short").write_bytes(make_text(1000))
    assert_refused(tinyshakespeare(tmp_path / "short"), "short has 1000 bytes, tinyshakespeare.txt has 1115394")
    (tmp_path / "other").write_bytes(make_text(1115394))
    assert_refused(tinyshakespeare(tmp_path / "other"), "not the right bytes")
    assert list((tmp_path / "data").iterdir()) == []  # nothing half done is left


def test_tinyshakespeare_from_a_file(tmp_path, tinyshakespeare):
    places = [ROOT / "data/tinyshakespeare.txt", ROOT.parent / "shared/data/tinyshakespeare.txt"]
    original = next((p for p in places if p.exists()), None)
    if not original:
        pytest.skip("data/tinyshakespeare.txt is not here: dev/data/tinyshakespeare.sh")
    r = tinyshakespeare(original)
    assert r.returncode == 0, r
    assert (tmp_path / "data/tinyshakespeare.txt").read_bytes() == original.read_bytes()
    assert "is here already" in tinyshakespeare().stdout
