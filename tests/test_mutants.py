"""Can the tests fail? Each mutant is one named break in a copy of the tree; some test must notice it (make mutants).

A mutant is (file, what stands there, what takes its place, the tests that should notice). The copy takes the built objects
along, so that only what the break touches is compiled again.
"""
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, build

LAW = "tests/test_law.py::test_random_layouts"
RANKS = "tests/test_law.py::test_every_pair_of_options"
TEN_STEPS = "tests/test_oracle.py::test_ten_steps"
GRADIENTS = "tests/test_oracle.py::test_gradients"

MUTANTS = {
    # data parallelism
    "a bucket is not reduced": ("dp_zero.c", "i >= 0; i--", "i > 0; i--", LAW),
    "nobody waits for the reduction": ("dp_zero.c", "    comm_wait(last); //", "    (void)last; //", LAW),
    "the norm counts a shard twice": ("dp_zero.c", "size_t begin = comm_shard_begin(b->count, dp->size, dp->rank);",
                                      "size_t begin = 0;", RANKS),
    "the clip forgets the norm": ("dp_zero.c", "c->grad_clip / grad_norm : 1", "c->grad_clip : 1", TEN_STEPS),
    "accumulated gradients are not cleared": ("dp_zero.c", "device_zero(b->grad, b->count * sizeof(floatX));", "", TEN_STEPS),
    # the step
    "the loss is scaled by a rank's own batch": ("train_gpt2.cu", "(float)(1 / tokens)",
                                                 "(float)((double)m->grid.dp->size / tokens)", RANKS),
    "ranks see the same sequences": ("train_gpt2.cu", "(uint64_t)dp->size + (uint64_t)dp->rank) * m->B",
                                     "(uint64_t)dp->size) * m->B", LAW),
    "vectors decay like matrices": ("train_gpt2.cu", "if (p->ndim == 1) continue;", "", TEN_STEPS),
    "the warm-up starts at zero": ("train_gpt2.cu", "c->lr * (double)(step + 1)", "c->lr * (double)step", TEN_STEPS),
    "nothing is computed again": ("train_gpt2.cu", "        block_recompute(m, l);\n", "", GRADIENTS),
    "rows past the validation set count": ("train_gpt2.cu", "if (w >= n) memset(", "if (w > n) memset(",
                                           "tests/test_run.py::test_evaluation_is_the_same_everywhere"),
    "a NaN is trained on": ("train_gpt2.cu", "if (!isfinite(r.loss) || !isfinite(r.grad_norm))", "if (r.loss > 1e30)",
                            "tests/test_cases.py::test_alone"),
    "all tensors start alike": ("train_gpt2.cu", "mix((uint64_t)m->config.seed) ^ name_hash(p->name)",
                                "mix((uint64_t)m->config.seed)", "tests/test_run.py::test_initial_values"),
    # checkpoints and data
    "the padding is saved": ("train_gpt2.cu", "size_t p_end = p->offset + p->rows * p->cols;",
                             "size_t p_end = p->offset + p->padded_rows * p->cols;", GRADIENTS),
    "AdamW's moments change places": ("train_gpt2.cu", "device_copy_in((k == 0 ? b->m : b->v)",
                                      "device_copy_in((k == 1 ? b->m : b->v)", "tests/test_resume.py::test_bit_for_bit"),
    "epochs are alike": ("runtime/data.c", "const uint64_t epoch = g / d->windows;", "const uint64_t epoch = 0 * g;", "tests/test_units.py"),
    "NaN is a number": ("runtime/flags.c", " || !isfinite(x)", "", "tests/test_cases.py::test_alone"),
    # the ring
    "the ring stops a hop early": ("runtime/comm.c", "2 * (c->size - 1) : c->size - 1", "2 * (c->size - 1) : c->size - 2",
                                   "tests/test_comm.py::test_collectives"),
    "bytes are counted twice": ("runtime/comm.c", "bytes += hop->sent;", "bytes += 2 * hop->sent;",
                                "tests/test_law.py::test_bytes_of_data_parallelism"),
    # kernels
    "scores are not scaled": ("kernels/flash_attention.c", "return 1 / sqrtf((float)D);", "return 1 + 0 * (float)D;", GRADIENTS),
    "gelu has another constant": ("kernels/gelu.c", "0.0713548162f", "0.07f", GRADIENTS),
    "rotations are not turned back": ("kernels/rope.c", "stride, -1.0f)", "stride, 1.0f)", GRADIENTS),
    "padding takes softmax mass": ("kernels/cross_entropy.c", "float max = row_max(row, V), sum = 0.0f;",
                                   "float max = row_max(row, V), sum = (float)(Vp - V) * fast_expf(-max);", GRADIENTS),
    "no bias correction": ("kernels/adamw.c", "(sqrtf(vi[j] * v_correction) + a.eps)", "(sqrtf(vi[j]) + a.eps)", TEN_STEPS),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_some_test_notices(name, tmp_path):
    file, before, after, tests = MUTANTS[name]
    build()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    tree = tmp_path / "tree"
    for path in filter(None, listed):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    shutil.copytree(ROOT / "build" / "cpu-fp32", tree / "build" / "cpu-fp32", symlinks=True)
    text = (tree / file).read_text()
    assert text.count(before) == 1, f"{file} holds {text.count(before)} places to break: {before}"
    (tree / file).write_text(text.replace(before, after))
    made = subprocess.run(["make", "-C", tree, "CFLAGS_MORE=-Wno-error"], capture_output=True, text=True)
    assert made.returncode == 0, f"the mutant does not build:\n{made.stderr}"

    env = {**os.environ, "SEED": "7"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    r = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=900)
    assert r.returncode == 1, f"{name}: nothing noticed (pytest ended with {r.returncode})\n{r.stdout[-2000:]}"
