"""Checkpoints from outside: several ranks, a disk that fills up, a rank that dies, and another reader of the format.

The C tests and the values that a step's tensors hold are in tests/test_checkpoint.c."""

import os
import subprocess

import numpy as np
import pytest

from conftest import environment, make

SECONDS = 300


@pytest.fixture(scope="session")
def program():
    return make("build/cpu-fp32/tests/test_checkpoint")


def run(program, *arguments, ranks=1, code=0, text=True, **env):
    command = [program, *map(str, arguments)]
    if ranks > 1:
        options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        command = ["mpirun", "-n", str(ranks), *options, *command]
    env = environment(OMP_NUM_THREADS="1", **env)
    r = subprocess.run(command, capture_output=True, text=text, timeout=SECONDS, env=env)
    assert code is None or r.returncode == code, f"{command}: exit code {r.returncode}\n{r.stdout}\n{r.stderr}"
    return r


def lines(r):
    """What the program itself said; mpirun says more."""
    return [line for line in r.stderr.splitlines() if line.startswith("train: ")]


def value(step, tensor, n):
    """The same hash as in test_checkpoint.c: [n] values of this tensor at this step."""
    i = np.arange(n, dtype=np.uint32)
    x = np.uint32(step * 0x9E3779B9 + tensor * 0x85EBCA6B & 0xFFFFFFFF) + i * np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(12)
    return x.view(np.int32).astype(np.float32) * np.float32(2**-31)


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_c(program, ranks):
    run(program, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_safetensors_reads_ours(program, tmp_path, ranks):
    safetensors = need("safetensors")
    run(program, "save", tmp_path, 12, ranks=ranks)
    shapes = [(257, 48), (48,), (48, 96), (1009,), (1,), (3, 400000)]
    names = ["wte.weight", "blocks.0.norm1.weight", "blocks.0.attention.out.weight", 'odd "name" \\ ü', "one", "wide"]
    with safetensors.safe_open(tmp_path / "step-00000012/weights.safetensors", "np") as f:
        assert sorted(f.keys()) == sorted(names)
        assert f.metadata() == {"values": "12", 'quote"': "line\nü\\", "empty": ""}
        for t, (name, shape) in enumerate(zip(names, shapes)):
            x = f.get_tensor(name)
            assert x.dtype == np.float32 and x.shape == shape
            assert np.array_equal(x.ravel(), value(12, t, x.size)), name


def test_we_read_theirs(program, tmp_path):
    torch, save_file = need("torch"), need("safetensors.torch").save_file
    torch.manual_seed(0)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    tensors = {
        "f32": torch.randn(3, 5, 7),
        "every half": halves.view(torch.float16).reshape(256, 256),
        "every bfloat": halves.clone().view(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    for name, x in tensors.items():
        got = np.frombuffer(run(program, "dump", tmp_path / "theirs.safetensors", name, text=False).stdout, "<f4")
        assert np.array_equal(got, x.float().numpy().ravel(), equal_nan=True), name
    save_file({"i": torch.zeros(3, dtype=torch.int64)}, tmp_path / "ints.safetensors")
    r = run(program, "dump", tmp_path / "ints.safetensors", "i", code=2)
    assert len(lines(r)) == 1 and "F32, F16 and BF16" in r.stderr


def need(name):
    """A package that make deps installs: without it this test is skipped, but not in CI."""
    if os.environ.get("CI"):
        return __import__(name, fromlist=["x"])
    return pytest.importorskip(name)


@pytest.fixture
def small_disk(tmp_path):
    """Room for one checkpoint (2 × 4.9 MB), not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    r = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "none", disk], capture_output=True, text=True)
    if r.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {r.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_full_disk(program, small_disk, ranks):
    runs = small_disk / "runs"
    run(program, "save", runs, 1, ranks=ranks)
    for step in (2, 1):  # a new step, and the same again: neither may cost the one that is there
        r = run(program, "save", runs, step, ranks=ranks, code=1)
        assert len(lines(r)) == 1, r.stderr
        assert lines(r)[0].startswith(f"train: cannot write {runs}/.step-0000000{step}.partial/"), r.stderr
        assert lines(r)[0].endswith("safetensors: No space left on device"), r.stderr
        assert sorted(os.listdir(runs)) == [".lock", "step-00000001"]
        assert run(program, "load", runs).stdout == "1\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_of_three_dies(program, tmp_path, rank):
    """At a few system calls of a save: no call harms the checkpoint before, and the next save clears up."""
    runs = tmp_path / "runs"
    run(program, "save", runs, 1, ranks=3)
    step, died = 1, 0
    for call in (0, 3, 5, 11, 16, 19, 25, 31) if rank == 0 else (0, 2, 4):
        r = run(program, "save", runs, step + 1, ranks=3, code=None, CRASH=f"{rank}:{call}")
        died += r.returncode != 0
        found = int(run(program, "load", runs).stdout)
        assert found in (step, step + 1)
        assert found == step + 1 or r.returncode != 0
        step += 1
        run(program, "save", runs, step, ranks=3)
        assert run(program, "load", runs).stdout == f"{step}\n"
        assert not [n for n in os.listdir(runs) if n.endswith((".partial", ".old"))]
    assert died >= 3
